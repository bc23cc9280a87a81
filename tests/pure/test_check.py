"""A check of a recipe compares every step that a run trained with that of the calm run."""

import json
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.check import command, plan
from elastic.check.causes import cause
from elastic.check.check import RecipeFailed, gradient_proof
from elastic.check.compare import first_difference, unsteady_values
from elastic.check.plan import launches, left_out
from elastic.check.proof import Checked, Proof, Result, Verdict
from elastic.check.runs import CheckStopped
from elastic.config.options import CheckOptions
from elastic.errors import UsageError
from elastic.faults.plan import check_fits, parse
from elastic.proof.evidence import LOSS
from elastic.system.trace_line import FirstGradient, TraceLine


def line(step, **changes):
    calm = TraceLine(
        step=step,
        generation=1,
        world_size=1,
        steps=9,
        shards=8,
        entries={LOSS: "0.5", "model.a": f"a{step}", "model.b": f"b{step}", "step.log(lr=...)": "0.1"},
    )
    return replace(calm, **changes)


def other(step, **entries):
    """The calm line of this step with these entries in place of its own."""
    return line(step, entries=line(step).entries | entries)


CALM = {step: line(step) for step in range(1, 10)}
LOGGED = {"step.log(lr=...)": "0.2"}  # another rate


def test_equal_steps_have_no_difference_also_where_a_step_was_trained_twice():
    twice = [*CALM.values(), line(5, generation=2, world_size=3)]

    assert first_difference(CALM, twice) is None


def test_the_first_step_that_differs_is_named_with_its_first_entry():
    """The replay of an earlier step differs, and a later step of the first generation does too."""
    found = [
        line(3),
        other(7, **{"model.a": "x", "model.b": "x"}),
        other(4, **{"model.b": "x"}),
    ]

    difference = first_difference(CALM, found)

    assert (difference.step, difference.entry) == (4, "model.b")


def test_an_entry_that_is_missing_differs():
    lacks = {name: value for name, value in line(2).entries.items() if name != "model.b"}
    assert first_difference(CALM, [line(2, entries=lacks)]).entry == "model.b"


def test_the_loss_comes_before_the_state_and_what_was_logged_after():
    found = other(2, **{"step.log(lr=...)": "0.2", "model.a": "x", LOSS: "0.6"})
    assert first_difference(CALM, [found]).entry == LOSS
    assert first_difference(CALM, [other(2, **LOGGED)]).entry == "step.log(lr=...)"


def test_values_that_two_equal_commands_log_differently_are_not_compared():
    """A recipe that logs seconds would never be the same."""
    calm = {1: other(1, **{"step.log(seconds=...)": "0.31"})}
    again = [other(1, **{"step.log(seconds=...)": "0.29"})]

    ignored = unsteady_values(calm, again)

    assert ignored == {"seconds"}
    assert first_difference(calm, again, ignored) is None
    both = [other(1, **{"step.log(seconds=...)": "0.3"} | LOGGED)]
    assert first_difference(calm, both, ignored).entry == "step.log(lr=...)"


def ends_of_epochs(steps, length):
    """The steps after which another epoch begins, where each has `length` steps."""
    return set(range(length, steps, length))


@given(st.integers(1, 1000), st.integers(1, 64), st.integers(1, 30))
def test_every_launch_fits_the_steps_and_shards_of_the_recipe(steps, shards, length):
    """A fault that can never be reached, or more workers than shards, would prove nothing."""
    chains = launches(steps, shards, ends_of_epochs(steps, length))

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
            assert all(1 < fault.trigger.number <= steps for fault in faults)
    whole = next((chain for chain in chains if chain[0].proof == plan.DRAINED), None)
    if whole is not None:
        (node_dies,) = parse(whole[1].options[-1])
        assert whole[0].leave_at < node_dies.trigger.number < steps


@given(st.integers(10, 200), st.integers(3, 50))
def test_runs_go_on_within_an_epoch_and_where_one_begins(steps, length):
    """What a recipe sets at the beginning of an epoch is lost within it, and what it does at the
    end of one is lost there. In the first epoch, both may be as at the top of the script.
    """
    ends = ends_of_epochs(steps, length)
    chains = {chain[0].proof: chain for chain in launches(steps, 8, ends)}

    restored = [fault.trigger.number - 1 for fault in parse(chains[plan.KILLED][0].options[-1])]
    leave = chains[plan.DRAINED][0].leave_at

    assert leave not in ends
    assert any(step not in ends for step in restored)
    assert any(step in ends for step in restored) == bool(ends)
    if steps > length + 2:
        assert leave > length
        assert max(restored) > length


ALL = {plan.AGAIN, plan.MORE_WORKERS, plan.KILLED, plan.DRAINED, plan.CHECKPOINT}


@given(st.integers(1, 20), st.integers(1, 9))
def test_every_proof_is_held_or_left_out_with_its_reason(steps, shards):
    """A row that is missing would look like one that was proved."""
    held = {(each.proof, each.workers) for chain in launches(steps, shards) for each in chain}
    missing = {(each.launch.proof, each.launch.workers): each for each in left_out(steps, shards)}
    assert {proof for proof, _ in [*held, *missing]} == ALL
    assert not {key for key in held if key in missing}
    assert all(each.reason for each in missing.values())
    # A run of one shard can never have two workers: for its users nothing is missing.
    assert any(each.is_gap for each in missing.values()) == (steps < 3)
    assert ((plan.MORE_WORKERS, 3) in held) == (shards >= 3)


def test_the_likely_cause_follows_from_what_differs_first():
    """A loss comes before the update of its step: if it is the same, the data and the forward were.
    A logged value alone says that a variable of the loop is not restored; with more workers, that
    it is of one of them.
    """
    update = first_difference(CALM, [other(5, **{"model.a": "x"})])
    forward = first_difference(CALM, [other(5, **{LOSS: "0.6", "model.a": "x"})])
    logged = first_difference(CALM, [other(5, **LOGGED)])
    assert (update.has_same_loss, forward.has_same_loss, logged.is_logged_alone) == (True, False, True)

    def first_of(proof, found):
        return cause(proof, found).partition("likeliest first: ")[2]

    assert first_of(plan.KILLED, update).startswith("a plain variable of the loop")
    assert first_of(plan.KILLED, forward).startswith("an object that State lacks")
    assert first_of(plan.MORE_WORKERS, forward).startswith("a forward that remembers")
    assert first_of(plan.MORE_WORKERS, update).startswith("run.rank")
    assert "elastic.Values" in cause(plan.DRAINED, logged)
    assert "of the last shard that it computed" in cause(plan.MORE_WORKERS, logged)
    for hint in (
        "plain attribute",
        "a dataset that keeps",
        "State lacks",
        "object inside another",
        "where an epoch begins",
        "a file that the recipe writes and reads back",
    ):
        assert hint in cause(plan.CHECKPOINT, forward)


def proof(**changes):
    calm = Proof(proof=plan.KILLED, workers=2, result=Result.EXACT, seconds=1.0)
    return replace(calm, **changes)


def found(*proofs, **changes):
    whole = Checked(
        recipe="r.py",
        result=Verdict.EXACT,
        exit_code=0,
        steps=2,
        steps_of_run=9,
        proofs=list(proofs),
        ignored=["seconds"],
        not_compared=["the steps after step 2", "files"],
    )
    return replace(whole, **changes)


FAILED = {
    "result": Result.FAILED,
    "ended": "exit code 1 instead of exit code 75",
    "failure": "Traceback (most recent call last):\n  File\nValueError: no",
}


def test_the_last_line_says_what_was_not_compared():
    for each in (found(proof()), found(proof(**FAILED), result=Verdict.FAILED)):
        lines = command.verdict(each).splitlines()
        assert lines[-1] == "not compared: the steps after step 2; files"
        assert (lines[0] == "exact: every run left the same state behind at each of the 2 steps") == (
            each.result is Verdict.EXACT
        )


def test_a_run_that_failed_says_why_in_its_row_and_whole_below():
    """The first line of a traceback says nothing; that of a refusal says all."""
    refused = proof(**FAILED | {"failure": "expected a number\n  at r.py:3: x()"})

    assert command.row(proof(**FAILED)).endswith(
        "FAILED with exit code 1 instead of exit code 75: ValueError: no"
    )
    assert command.row(refused).endswith("instead of exit code 75: expected a number")
    long = proof(**FAILED | {"failure": "expected " + "one number " * 99})
    assert len(command.row(long)) < 400
    whole = command.verdict(found(proof(**FAILED), result=Verdict.FAILED))
    assert whole.startswith("a killed worker, 2 workers: exit code 1 instead of exit code 75:\nTraceback")
    assert "\nnot exact\n" in whole


def test_what_was_not_proved_is_in_its_row_and_in_the_conclusion():
    """Neither a gradient that could not be compared nor a run that did not take place is exact."""
    gradient = proof(proof=plan.GRADIENT, result=Result.NOT_RUN, seconds=0.0, note="why")
    left = proof(result=Result.NOT_RUN, seconds=0.0, note="it takes 2 steps")
    assert command.row(gradient).endswith("  NOT COMPARED: why")
    assert command.row(left).endswith("  NOT RUN: it takes 2 steps")

    assert "\nexact" not in command.verdict(
        found(left, result=Verdict.UNPROVED, unproved=["a killed worker (it takes 2 steps)"])
    )
    said = command.verdict(found(gradient))
    assert said.startswith("exact, but the first gradient was not compared: every run left the same state")


def test_what_the_calm_run_noted_is_said_before_the_conclusion():
    """A queue in a buffer becomes a mean over shards, alike in every run."""
    said = command.verdict(found(proof(), notes=["note: model.queue: a buffer of floats"]))
    assert said.startswith("note: model.queue: a buffer of floats\nexact: ")


@pytest.mark.parametrize(
    ("error", "result", "code"),
    [
        (UsageError("expected a number"), "refused", 2),
        (RecipeFailed("ValueError: no"), "failed", 1),
        (CheckStopped(15), "stopped", 143),
    ],
)
def test_a_check_that_breaks_off_prints_one_json_document_too(
    tmp_path, monkeypatch, capsys, error, result, code
):
    """The same keys as in that of a whole check, and the rows that were known by then."""
    recipe = tmp_path / "r.py"
    recipe.write_text("import elastic")

    def breaks_off(_options, tell, _news):
        tell(proof())
        raise error

    monkeypatch.setattr(command, "check", breaks_off)
    options = CheckOptions(recipe=str(recipe), recipe_args=(), steps=None, as_json=True)
    with pytest.raises(type(error)):
        command.run_check(options)

    document = json.loads(capsys.readouterr().out)
    assert (document["result"], document["exit_code"], document["error"]) == (result, code, str(error))
    assert document["proofs"] == [asdict(proof())]
    assert set(document) == {each.name for each in fields(Checked)}


@pytest.mark.parametrize(
    ("difference", "obstacle", "result", "says"),
    [
        (1e-7, "", Result.EXACT, "1.0e-07 of its norm"),
        (0.2, "", Result.DIFFERS, "2.0e-01 of its norm"),
        (None, "BatchNorm normalises within a shard", Result.NOT_RUN, "BatchNorm normalises"),
    ],
)
def test_the_first_gradient_is_that_of_the_whole_batch_within_rounding(difference, obstacle, result, says):
    found = FirstGradient(difference=difference, parameter="model.a", obstacle=obstacle)

    proof = gradient_proof(found)

    assert proof.result is result
    assert says in proof.note
    assert proof.entry == ("model.a" if result is Result.DIFFERS else None)
