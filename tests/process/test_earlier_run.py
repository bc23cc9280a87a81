"""A run directory that earlier code left is read as that code would have done it.

tests/fixtures/earlier_run holds one, made before the modules moved into packages: a worker was
killed in step 6, and SIGTERM interrupted the run (exit 75) after step 9 of 16. expected.json holds
what `report`, `status` and `verify` then printed. Such a run is not resumed.
"""

import json
import shutil
from pathlib import Path

import pytest

FIXTURE = Path(__file__).parents[1] / "fixtures" / "earlier_run"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())


@pytest.fixture
def earlier_run(drill):
    shutil.copytree(FIXTURE / "run", drill.run.local)
    return drill


def with_keys_of(expected, found):
    """found: an object, with those keys alone that `expected` has; also the objects of a list."""
    parts = {}
    for key, then in expected.items():
        parts[key] = found[key]
        if isinstance(then, list) and len(then) == len(found[key]):
            pairs = zip(then, found[key], strict=True)
            parts[key] = [with_keys_of(a, b) if isinstance(a, dict) else b for a, b in pairs]
    return parts


@pytest.mark.parametrize("command", ["report", "status", "verify"])
def test_a_run_of_earlier_code_is_read_as_before(earlier_run, command):
    """The JSON may have more keys by now."""
    code, found = earlier_run.inspects(command, earlier_run.run.url)

    assert code == 0
    if command == "status":
        assert found["last_checkpoint"]["age_s"] > 0
        found["last_checkpoint"]["age_s"] = None
    assert with_keys_of(EXPECTED[command], found) == EXPECTED[command]
