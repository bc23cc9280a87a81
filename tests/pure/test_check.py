"""A check of a recipe compares every step that a run trained with that of the calm run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.check import command, plan
from elastic.check.causes import cause
from elastic.check.check import Checked, Proof, gradient_proof
from elastic.check.compare import averaged_buffers, first_difference, unsteady_values
from elastic.check.plan import launches, left_out
from elastic.faults.grammar import parse
from elastic.faults.plan import check_fits
from elastic.system.trace_line import FirstGradient, TraceLine


def line(step, **changes):
    calm = TraceLine(
        step=step,
        generation=1,
        world_size=1,
        steps=9,
        shards=8,
        chain=f"chain {step}",
        loss="0.5",
        logged={"lr": "0.1"},
        entries={"model.a": f"a{step}", "model.b": f"b{step}"},
    )
    return replace(calm, **changes)


CALM = {step: line(step) for step in range(1, 10)}


def test_equal_steps_have_no_difference_also_where_a_step_was_trained_twice():
    twice = [*CALM.values(), line(5, generation=2, world_size=3)]

    assert first_difference(CALM, twice) is None


def test_the_first_step_that_differs_is_named_with_its_first_entry():
    """The replay of an earlier step differs, and a later step of the first generation does too."""
    found = [
        line(3),
        line(7, entries={"model.a": "x", "model.b": "x"}),
        line(4, entries={"model.a": "a4", "model.b": "x"}),
    ]

    difference = first_difference(CALM, found)

    assert (difference.step, difference.entry) == (4, "model.b")


def test_an_entry_that_is_missing_differs():
    assert first_difference(CALM, [line(2, entries={"model.a": "a2"})]).entry == "model.b"


def test_loss_gradients_and_logged_values_are_compared_after_the_state():
    assert first_difference(CALM, [line(2, loss="0.6", chain="x")]).entry == "the loss"
    assert first_difference(CALM, [line(2, chain="x")]).entry == "the gradients"
    assert first_difference(CALM, [line(2, logged={"lr": "0.2"})]).entry == "step.log(lr=...)"


def test_values_that_two_equal_commands_log_differently_are_not_compared():
    """A recipe that logs seconds would never be the same."""
    calm = {1: line(1, logged={"seconds": "0.31", "lr": "0.1"})}
    again = [line(1, logged={"seconds": "0.29", "lr": "0.1"})]

    ignored = unsteady_values(calm, again)

    assert ignored == {"seconds"}
    assert first_difference(calm, again, ignored) is None
    other = [line(1, logged={"seconds": "0.3", "lr": "0.2"})]
    assert first_difference(calm, other, ignored).entry == "step.log(lr=...)"


@given(st.integers(1, 1000), st.integers(1, 64))
def test_every_launch_fits_the_steps_and_shards_of_the_recipe(steps, shards):
    """A fault that can never be reached, or more workers than shards, would prove nothing."""
    chains = launches(steps, shards)

    for chain in chains:
        assert not chain[0].resumes
        assert all(each.resumes for each in chain[1:])
        assert chain[-1].ends == (0,)
        for each in chain:
            assert 1 <= each.workers <= shards
            assert cause(each.proof, None)
            assert each.leave_at is None or 1 <= each.leave_at < steps
            faults = parse(each.options[-1]) if each.options else []
            check_fits(faults, nodes=1, nproc=each.workers)
            assert all(fault.trigger.step <= steps for fault in faults)


ALL = {plan.AGAIN, plan.MORE_WORKERS, plan.KILLED, plan.DRAINED, plan.CHECKPOINT}


@given(st.integers(1, 20), st.integers(1, 9))
def test_every_proof_is_held_or_left_out_with_its_reason(steps, shards):
    """A row that is missing would look like one that was proved."""
    held = {each.proof for chain in launches(steps, shards) for each in chain}
    assert held | set(left_out(steps, shards)) == ALL
    assert not held & set(left_out(steps, shards))
    if steps >= 3 and shards > 1:
        assert held == ALL


def test_the_likely_cause_follows_from_what_differs_first():
    """A loss comes before the update of its step: if it is the same, the data and the forward were.
    A logged value alone says that a variable of the loop is not restored.
    """
    update = first_difference(CALM, [line(5, entries={"model.a": "x", "model.b": "b5"})])
    forward = first_difference(CALM, [line(5, loss="0.6", entries={"model.a": "x", "model.b": "b5"})])
    logged = first_difference(CALM, [line(5, logged={"lr": "0.2"})])
    assert (update.has_same_loss, forward.has_same_loss, logged.is_logged_alone) == (True, False, True)

    def first_of(proof, found):
        return cause(proof, found).partition("likeliest first: ")[2]

    assert first_of(plan.KILLED, update).startswith("a plain variable of the loop")
    assert first_of(plan.KILLED, forward).startswith("an object that State lacks")
    assert first_of(plan.MORE_WORKERS, forward).startswith("a forward that remembers")
    assert first_of(plan.MORE_WORKERS, update).startswith("run.rank")
    assert "elastic.Values" in cause(plan.DRAINED, logged)
    for hint in ("plain attribute", "a dataset that keeps", "State lacks", "object inside another"):
        assert hint in cause(plan.CHECKPOINT, forward)


def test_buffers_of_floats_that_changed_are_named():
    """A queue in a buffer becomes a mean over shards, alike in every run."""
    buffers = ["model.queue", "model.constant"]
    gradient = FirstGradient(difference=0.0, parameter="", obstacle="", buffers=buffers)
    calm = [
        line(step, gradient=gradient, entries={"model.queue": str(step), "model.constant": "same"})
        for step in (1, 2, 3)
    ]
    assert averaged_buffers(calm) == ["model.queue"]
    assert averaged_buffers([line(1), line(2)]) == []


@pytest.mark.parametrize("failed", [False, True])
def test_the_last_line_says_what_was_not_compared(failed):
    proof = Proof(proof=plan.KILLED, workers=2, same=not failed, seconds=1.0)
    if failed:
        proof = replace(proof, failure="exit code 1 instead of exit code 0:\nValueError: no")
    found = Checked(
        recipe="r.py",
        same=not failed,
        steps=2,
        steps_of_run=9,
        proofs=[proof],
        ignored=["seconds"],
        not_compared=["the steps after step 2", "files"],
        cause=None,
    )
    first, *_, last = command.verdict(found).splitlines()
    assert last == "not compared: the steps after step 2; files"
    assert first.startswith("a killed worker, 2 workers: exit code 1" if failed else "exact: ")
    assert "exit code 1 instead" in command.row(proof) if failed else "the same" in command.row(proof)


@pytest.mark.parametrize(
    ("difference", "obstacle", "same", "says"),
    [
        (1e-7, "", True, "1.0e-07 of its norm"),
        (0.2, "", False, "2.0e-01 of its norm"),
        (None, "BatchNorm normalises within a shard", True, "not compared: BatchNorm"),
    ],
)
def test_the_first_gradient_is_that_of_the_whole_batch_within_rounding(difference, obstacle, same, says):
    found = FirstGradient(difference=difference, parameter="model.a", obstacle=obstacle)

    proof = gradient_proof(found)

    assert proof.same == same
    assert says in proof.note
    assert proof.entry == (None if same else "model.a")
