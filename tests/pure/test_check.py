"""A check of a recipe compares every step that a run trained with that of the calm run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.check import plan
from elastic.check.check import gradient_proof
from elastic.check.compare import CAUSES, first_difference, unsteady_values
from elastic.check.plan import launches
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
            assert each.proof in CAUSES
            assert each.leave_at is None or 1 <= each.leave_at < steps
            faults = parse(each.options[-1]) if each.options else []
            check_fits(faults, nodes=1, nproc=each.workers)
            assert all(fault.trigger.step <= max(steps, 2) for fault in faults)


def test_a_check_of_a_few_steps_holds_every_proof():
    proofs = {each.proof for chain in launches(plan.LEAST_STEPS, 8) for each in chain}

    assert proofs | {plan.GRADIENT} == set(CAUSES)


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
