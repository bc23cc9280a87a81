"""A difference between ranks, or of an audited shard, is never masked: the run ends with the
undisturbed digest, or says why it cannot.
"""

import pytest
from kind import PRELUDE

LAST = 24
# It is not exact: from step 5 on rank 1 draws noise of its own into a weight.
RANKED = """
for step in run.steps(run.data(samples, epochs=EPOCHS), elastic.State(model=model, optimizer=optimizer)):
    step.mean_loss(loss_of)
    optimizer.step()
    step.log(both=1, own=run.rank)
    if step.number >= 5 and run.rank == 1:
        (noise := torch.Generator()).seed()
        model[0].weight.detach().add_(torch.rand(8, 4, generator=noise))
"""


@pytest.mark.parametrize(
    ("nodes", "snapshots", "fault"),
    [(1, "audited", "step 9 rank 0: flip optimizer"), (2, "off", f"step {LAST} rank 1: flip")],
)
def test_a_flipped_bit_does_not_change_the_result(drill, undisturbed, nodes, snapshots, fault):
    """Two ranks on one node, or on two; of the rank that writes the node's snapshots, or the other;
    in the middle of the run, or after its last step, where no other step follows. No restart is
    left: none is used.
    """
    options = ("--snapshot-every", snapshots, "--max-restarts", "0", "--faults", fault)
    if snapshots == "audited":  # the audit of a later step meets ranks that differ already
        options = ("--snapshot-every", "off", "--audit", "1steps", *options[2:])
    agents = [drill.start("--nproc-per-node", "2", *options)] if nodes == 1 else drill.start_two(*options)
    drill.ends_like(undisturbed, *agents)
    assert drill.values("generation_started", "cause") == [("start",), ("ranks differed",)]
    ((found, entry, alike),) = drill.values("divergence_detected", "step", "entry", "ranks")
    assert found >= int(fault.split()[1])
    assert alike == [[0], [1]]
    ((judged, named, verdict),) = drill.values("divergence_judged", "step", "nodes", "verdict")
    assert (judged, verdict) == (found, "machine")
    assert set(named) <= {node for event in drill.events("generation_started") for node in event["nodes"]}
    assert entry
    if found == int(fault.split()[1]):  # compared before the error reached anything else
        assert entry.startswith("optimizer." if "optimizer" in fault else "model.")
        rank = int(fault.split()[3].rstrip(":"))
        assert drill.values("worker_started", "node", rank=rank, generation=1) == [tuple(named)]
    _, report = drill.inspects("report", drill.run.url)
    assert report["divergences"] == [
        {"step": found, "node": node, "entry": entry, "verdict": "machine"} for node in named
    ]


def test_a_recipe_that_differs_again_ends_the_run_at_once(drill, tmp_path):
    """Rank 1 draws noise of its own into a weight, from step 5 on: each time another number. No
    restart is used, nothing of a step on which the ranks did not agree is committed, and the run
    is not taken up again with what the ranks had.
    """
    options = "--nproc-per-node", "2", "--snapshot-every", "1", "--save-every", "1steps"
    (recipe := tmp_path / "ranked.py").write_text(PRELUDE + RANKED)
    agent = drill.start(*options, recipe=recipe)
    agent.ends_with(1)

    found = "model.0.weight differs between ranks [0] | [1] after step 5"
    assert f"the ranks differed: {found}; all agreed up to step 4" in agent.output
    assert f"training failed: {found}. So it did when these steps were done again" in agent.output
    assert "exit code 7" not in agent.output and agent.output.count("So it did") == 1
    assert drill.values("generation_started", "cause", "restarts") == [("start", 0), ("ranks differed", 0)]
    assert drill.values("divergence_judged", "step", "nodes", "verdict") == [(5, [], "recipe")]
    assert max((step for (step,) in drill.values("checkpoint_committed", "step")), default=0) <= 4
    _, report = drill.inspects("report", drill.run.url)
    assert report["divergences"] == [
        {"step": 5, "node": None, "entry": "model.0.weight", "verdict": "recipe"}
    ]
    assert report["logged_by_rank"] == ["own"]


def test_a_gradient_that_a_machine_got_wrong_is_computed_again(drill, undisturbed):
    """One bit flips in rank 1's gradient before the sum, so that all ranks share the wrong sum, and
    no comparison of their states would ever find it. Each rank has one shard, which is audited.
    """
    options = ("--nproc-per-node", "4", "--audit", "1steps", "--max-restarts", "0")
    drill.ends_like(undisturbed, drill.start(*options, "--faults", "step 6 rank 1: flip gradient"))
    _, report = drill.inspects("report", drill.run.url)
    assert report["audits"] == {"done": 24, "failed": 1}
    fields = "step", "shard", "ranks", "entry", "verdict"
    assert drill.values("audit_failed", *fields) == [
        (6, 1, [1, 0], "the gradient of model.4.weight", "machine")
    ]
    (divergence,) = report["divergences"]
    assert (divergence["step"], divergence["verdict"]) == (6, "machine")
    assert divergence["entry"] == "the gradient of model.4.weight"
