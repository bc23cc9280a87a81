"""An audit ends a run that is not exact, and repairs what a machine computed wrongly."""

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_a_forward_that_remembers_ends_the_run_at_its_first_audit(drill):
    """One worker, with which no other result is there to compare: with two workers, whose models
    count half as many calls, the weights would be others. The count is where only its effect
    shows. Restarts would not help, and none is used.
    """
    agent = drill.start(env={"TINY_REMEMBER": "1"})
    agent.ends_with(1)

    assert "a counter (use step.number)" in agent.output
    assert drill.values("generation_started", "cause") == [("start",)]
    ((step, *found),) = drill.values("audit_failed", "step", "ranks", "entry", "verdict")
    assert found == [[0, 0], "what call 1 of the step returned", "recipe"]
    assert step <= 4 and f"step {step}, shard" in agent.output
    assert drill.events("checkpoint_committed") == []
    _, report = drill.inspects("report", drill.run.url)
    assert report["audits"] == {"done": step - 1, "failed": 1}


def test_a_gradient_that_a_machine_computed_wrongly_is_computed_again(drill, tmp_path):
    """One bit flips in rank 1's gradient before the sum, so that all ranks share the wrong sum, and
    no comparison of their states would ever find it. Each rank has one shard, which is audited.
    """
    calm = ("--nproc-per-node", "2", "--audit", "off", "--run-dir", str(tmp_path / "calm"))
    drill.start(*calm, arguments=("--shards", "2")).ends_with(0)
    _, undisturbed = drill.inspects("report", str(tmp_path / "calm"))
    options = ("--nproc-per-node", "2", "--audit", "1steps", "--max-restarts", "0")
    plan = ("--faults", "step 6 rank 1: flip gradient")
    drill.start(*options, *plan, arguments=("--shards", "2")).ends_with(0)

    _, report = drill.inspects("report", drill.run.url)
    assert report["final_digest"] == undisturbed["final_digest"]
    assert report["audits"] == {"done": 24, "failed": 1}
    assert undisturbed["audits"] == {"done": 0, "failed": 0}
    fields = "step", "shard", "ranks", "entry", "verdict"
    assert drill.values("audit_failed", *fields) == [
        (6, 1, [1, 0], "the gradient of model.4.weight", "machine")
    ]
    (divergence,) = report["divergences"]
    assert (divergence["step"], divergence["verdict"]) == (6, "machine")
    assert divergence["entry"] == "the gradient of model.4.weight"
