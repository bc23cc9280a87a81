"""A run that begins from another one is one trajectory, whatever dies while it begins."""

import shutil

from elastic.checkpoint.catalog import list_commits
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock

# Another batch than the parent's: 12 steps.
ARGUMENTS = ("--global-batch", "64")
PLAN = "generation 1 rank 1 restore: kill; step 2 rank 1 backward: kill; step 6 rank 0: pause 3s; step 5 node 0: terminate"


def test_a_run_from_another_depends_on_no_death_nor_the_parent(drill, drills, tmp_path, undisturbed):
    """Two workers: one is killed before the first state is saved, when only the parent has it, and
    one in a step. Then the node leaves, the parent is deleted, and one worker finishes. Beside it,
    python alone, in peace, whose state of step 0 has the digest of the parent's last step.
    """
    first = shutil.copytree(undisturbed.run.local, tmp_path / "first")
    begins = ("--from", str(first))
    stormy = drill.start(*begins, "--nproc-per-node", "2", "--faults", PLAN, arguments=ARGUMENTS)
    calm = drills(tmp_path / "calm")
    calm.shut(1)
    env = {"ELASTIC_RUN_DIR": calm.run.url, "ELASTIC_FROM": str(first)}
    alone = calm.start_script(stormy.words[0], *ARGUMENTS, env=env)
    calm.stands(1, ranks=1)
    (record,), damage = list_commits(open_store(calm.run.checkpoints_url), SystemClock())
    assert (record.step, record.digest, damage) == (0, undisturbed.digest, [])
    calm.open(1)
    alone.ends_with(0)
    stormy.ends_with(75)
    shutil.rmtree(first)
    drill.start(*begins, "--nproc-per-node", "1", arguments=ARGUMENTS).ends_with(0)

    for each in stormy, alone:
        assert f"begins from step 24 of {first} (digest {undisturbed.digest[:16]}), entries" in each.output
    assert len(drill.events("fault_injected")) == 4
    assert drill.values("restored", "generation", "step", "source")[0] == (2, 0, "parent")
    assert drill.inspects("diff", drill.run.url, calm.run.url)[0] == 0
    assert drill.events("run_finished")[0]["digest"] == calm.events("run_finished")[0]["digest"]
    (ancestor,) = drill.inspects("report", drill.run.url)[1]["lineage"]
    assert (ancestor["step"], ancestor["digest"]) == (24, undisturbed.digest)
