"""A run directory that earlier code left is read, and resumed, as that code would have done it.

tests/fixtures/earlier_run holds one, made before the modules moved into packages, by the command of
the test below: a worker was killed in step 6, and SIGTERM interrupted the run (exit 75) after step
9 of 16. expected.json holds what `report`, `status` and `verify` then printed, and the digest of a
run of the recipe that nothing disturbed.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

FIXTURE = Path(__file__).parents[1] / "fixtures" / "earlier_run"
RECIPE = FIXTURE / "exact.py"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text())
PLAN = "step 6 rank 1 backward: kill; step 9 rank 0: pause 3s; step 8 node 0: terminate"
OPTIONS = ("--nproc-per-node", "2", "--keep", "2", "--snapshot-every", "1", "--faults", PLAN)
# The fields of run.json that must match on resume, in the order in which run_id is made of them.
COMPARED = ("recipe", "arguments", "seed", "global_batch", "shards", "torch", "device", "threads", "format")


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


def test_a_run_of_earlier_code_resumes_to_the_digest_of_a_calm_run(earlier_run, drills, tmp_path):
    """The same command; the faults of its plan have struck already and leave it alone.

    A run resumes only under the torch that began it, so the copy is made one of the present torch.
    That changes no number: the recipe's arithmetic is exact, and so its bits are those of every
    torch.
    """
    begin_under(torch.__version__, earlier_run.run.local)
    env = {"CUDA_VISIBLE_DEVICES": ""}
    calm = drills(tmp_path / "calm")

    earlier_run.start(*OPTIONS, recipe=RECIPE, env=env).ends_with(0)
    calm.start(recipe=RECIPE, env=env).ends_with(0)

    (finished,) = earlier_run.events("run_finished")
    assert finished["digest"] == EXPECTED["calm_digest"]
    assert earlier_run.inspects("diff", earlier_run.run.url, calm.run.url)[0] == 0
    restored = earlier_run.events("restored", generation=3)
    assert {(event["step"], event["source"]) for event in restored} == {(9, "checkpoint")}
    assert len(earlier_run.events("fault_injected")) == 3


def begin_under(version, run):
    """Rewrite the copy of the fixture as if the torch of that version had begun it.

    The names and checksums of the format are made here once more, independently of the code under
    test.
    """
    path = run / "run.json"
    identity = json.loads(path.read_text())
    earlier = run_id(identity)
    identity["torch"] = version
    path.write_text(json.dumps(identity, indent=1) + "\n")
    for path in run.glob("checkpoints/*/COMMIT.json"):
        record = json.loads(path.read_text())
        claimed = record.pop("self_sha256")
        assert claimed == checksum(record)
        assert record["run_id"] == earlier
        record |= {"run_id": run_id(identity), "torch": version}
        path.write_text(json.dumps(record | {"self_sha256": checksum(record)}))


def run_id(identity):
    compared = [identity[name] for name in COMPARED]
    return hashlib.sha256(json.dumps(compared).encode()).hexdigest()[:16]


def checksum(record):
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
