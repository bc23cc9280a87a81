"""A run of real processes is listed, exported and cleaned, and stays what it was."""

import shutil

import pytest
import torch

from elastic.cli import main
from elastic.storage.remote import open_store

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_a_finished_run_answers_as_before_after_it_was_cleaned(drill, tmp_path):
    """Two generations, because a worker was killed. The run was copied before: the copy and what is
    left do not differ. The same command still finds it complete.
    """
    drill.start("--faults", "step 10 rank 0 backward: kill").ends_with(0)
    run, copy = drill.run.url, str(shutil.copytree(drill.run.local, tmp_path / "copy"))
    before = [drill.inspects(*words) for words in (("report", run), ("verify", run))]
    stored = {each.name for each in open_store(f"{run}/checkpoints").list()}
    main(["export", run, str(tmp_path / "before.pth")])

    code, found = drill.inspects("clean", run, "--yes")

    assert (code, found["removed"]) == (0, len(found["files"]))
    names = {each["name"] for each in found["files"]}
    assert "logs/000001/rank0.log" in names
    assert not any(name.startswith("logs/000002") for name in names)
    assert [drill.inspects(*words) for words in (("report", run), ("verify", run))] == before
    assert {each.name for each in open_store(f"{run}/checkpoints").list()} == stored
    assert drill.inspects("diff", copy, run)[0] == 0
    assert drill.inspects("runs", run)[1]["runs"][0]["state"] == "finished"
    main(["export", run, str(tmp_path / "after.pth")])
    a, b = (torch.load(tmp_path / f"{name}.pth", weights_only=True) for name in ("before", "after"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    again = drill.start()
    again.ends_with(0)
    assert f"the run in {run} is finished: 24 steps" in again.output
