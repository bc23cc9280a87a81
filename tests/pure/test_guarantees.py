"""Modules, tests and scenarios that docs/guarantees.md and docs/failures.md name exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCENARIOS = {path.stem for path in (ROOT / "tests/scenarios/cluster").glob("*.txt")}
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


def rows(document):
    """The names of each cell, by row of the table."""
    lines = (ROOT / "docs" / document).read_text().splitlines()
    table = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[set(re.findall(r"`([^`]+)`", cell)) for cell in row] for row in table[2:]]


def test_every_guarantee_names_a_module_and_tests_that_exist():
    for _, modules, tests in rows("guarantees.md"):
        assert len(modules) == 1
        assert all((ROOT / module).is_file() for module in modules), modules
        assert tests
        assert tests <= TESTS, tests - TESTS


def test_every_failure_names_scenarios_or_tests_that_exist():
    proofs = [row[-1] for row in rows("failures.md")]
    assert all(proofs)
    assert set().union(*proofs) <= TESTS | SCENARIOS
    assert SCENARIOS - {"undisturbed"} <= set().union(*proofs)
