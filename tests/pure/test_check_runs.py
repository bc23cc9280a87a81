"""A check has a row for each run, up to the first that fails."""

from dataclasses import replace

import pytest

from elastic.check import check as module
from elastic.check import plan
from elastic.check.check import RecipeFailed, Result, check
from elastic.check.runs import Ended
from elastic.config.options import CheckOptions
from elastic.errors import UsageError
from elastic.proof.evidence import TraceLine

OPTIONS = CheckOptions(recipe="r.py", recipe_args=(), steps=None, as_json=False)
NOTE = "note: model.queue: a buffer"
ERROR = "Traceback (most recent call last):\n  File\nValueError: no"


def lines(trained, steps=32):
    first = TraceLine(step=1, generation=1, world_size=1, steps=steps, shards=4, entries={}, notes=[NOTE])
    later = (
        replace(first, step=step, epoch=(step - 1) // 4, entries={"model.a": str(step)}, notes=[])
        for step in range(2, trained + 1)
    )
    return [first, *later][:trained]


def ended(code, trained=8, words="", stopped=None):
    return Ended(code=code, words=words, lines=lines(trained), seconds=1.0, stopped=stopped)


@pytest.fixture
def checks(monkeypatch):
    """Checks a recipe whose runs end as they should, but for those that are given by proof."""

    def checked(others, trained=8, **calm):
        def run(_options, _root, launch, steps, *_):
            if launch.proof != plan.CALM:
                checked.steps.add(steps)
            return others.get(launch.proof, ended(launch.code, trained, **calm))

        monkeypatch.setattr(module, "run", run)
        rows, checked.steps = [], set()
        return check(OPTIONS, rows.append), rows

    return checked


@pytest.mark.parametrize(
    ("words", "row"),
    [
        # The first line of a traceback says nothing; that of a refusal says all.
        (ERROR, "instead of exit code 75: ValueError: no"),
        ("expected a number\n  at r.py:3: x()", "instead of exit code 75: expected a number"),
        ("one number " * 99, " ..."),
    ],
)
def test_the_run_that_fails_is_the_last_and_says_why(checks, words, row):
    """In its row, and whole below."""
    found, rows = checks({plan.MORE_WORKERS: ended(1, words=words)})

    assert [each.proof for each in rows] == [plan.CALM, plan.AGAIN, plan.MORE_WORKERS]
    assert (rows[-1].ended, rows[-1].failure) == ("exit code 1 instead of exit code 75", words)
    assert (found.result, found.exit_code, found.proofs) == (Result.FAILED, 1, rows[1:])
    assert module.row(rows[-1]).endswith(row) and len(module.row(rows[-1])) < 400
    verdict = module.verdict(found)
    assert f"exit code 1 instead of exit code 75:\n{words}\nnot exact\n" in verdict
    assert f"not compared: the run of {plan.CHECKPOINT}; the run of {plan.KILLED}; the steps" in verdict


def test_a_recipe_that_ends_itself_has_no_steps_after_that(checks):
    found, rows = checks({}, stopped="the recipe left the loop")

    assert (found.result, found.steps, found.steps_of_run) == (Result.EXACT, 8, 8)
    assert checks.steps == {9}  # a run that does not end itself must not be cut off where the calm one ended
    assert rows[0].note.startswith("all 8 steps, after which the recipe ends the run")
    assert module.verdict(found).startswith(f"{NOTE}\nexact: every run left")
    assert not any("the steps after" in part for part in found.not_compared)


@pytest.mark.parametrize(
    ("others", "calm", "says"),
    [
        (ended(0, 9), "enough", "not ended after step 9, the calm run ended by the recipe after step 8"),
        (ended(0, 5, stopped="enough"), "enough", "ended by the recipe after step 5, the calm run ended"),
        (ended(0, 8, stopped="enough"), None, "ended by the recipe after step 8, the calm run not ended"),
        (ended(0, 5), None, "not ended after step 5, the calm run not ended after step 8"),
    ],
)
def test_a_run_that_ends_elsewhere_than_the_calm_one_fails(checks, others, calm, says):
    """A counter of its own begins again in a restarted process; all common steps are alike."""
    found, (*_, killed) = checks({plan.KILLED: others}, stopped=calm)

    assert says in killed.ended
    assert "step.number" in killed.failure
    assert (found.result, found.exit_code) == (Result.FAILED, 1)


@pytest.mark.parametrize(
    ("calm", "error", "says"),
    [
        (ended(2, 0, "expected a number"), UsageError, "^expected a number$"),
        (ended(1, 3, ERROR), RecipeFailed, "ValueError: no\nthe calm run .* exit code 1 after 3 steps"),
        (ended(0, 0), RecipeFailed, "exit code 0 after 0 steps; nothing was compared$"),
        (ended(0, 2), RecipeFailed, "expected a recipe of 3 steps or more, found 2"),
        (ended(None, 3), RecipeFailed, "no end within 900 s after 3 steps.*--steps 3"),
        (ended(None, 1), RecipeFailed, "no end within 900 s after 1 steps.*less data"),
    ],
)
def test_a_calm_run_that_fails_ends_the_check_with_its_reason(checks, calm, error, says):
    with pytest.raises(error, match=says) as raised:
        checks({plan.CALM: calm})
    assert raised.value.exit_code == (2 if error is UsageError else 1)


def test_a_script_without_the_library_is_refused(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("print('hello')")
    with pytest.raises(UsageError, match="expected a recipe that imports elastic"):
        module.run_check(replace(OPTIONS, recipe=str(script)))
