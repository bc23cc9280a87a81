"""What a function of run.on_step raises, whatever it is, is said once and ends nothing."""

import asyncio
from functools import partial

import pytest
from run_records import events
from steps import NoPage

from elastic.errors import UsageError
from elastic.observe.log import EventLog
from elastic.observe.step_line import StepLine
from elastic.system.clock import SystemClock
from elastic.train.loop.on_step import StepFunctions
from elastic.worker.heartbeat import HeartbeatSender


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no network"), "ValueError: no network"),
        (SystemExit("cannot log in"), "SystemExit: cannot log in"),
        (SystemExit(0), "SystemExit: 0"),
        (UnspeakableError(), "UnspeakableError"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
def test_what_a_function_raises_is_said_once_and_the_next_step_calls_it_again(tmp_path, capsys, error, said):
    seen, functions = [], StepFunctions()

    def track(record):
        seen.append(record["step"])
        raise error

    functions.add(track)
    log = EventLog(tmp_path / "a-worker0.jsonl", node="a", clock=SystemClock())
    for step in (1, 2, 2, 3):
        functions.report(StepLine(step=step), HeartbeatSender(NoPage(), 0), log, lambda: None)
    assert seen == [1, 2, 3]
    (event,) = events(tmp_path)
    assert (event["event"], event["step"]) == ("on_step_failed", 1)
    assert said in event["message"]
    assert "failed at 3 steps" in functions.told_at_the_end(tmp_path, generation=0)
    capsys.readouterr()


def test_steps_that_were_reported_and_then_given_another_result_are_said_once(tmp_path, capsys):
    """A tracker was given what a wrong machine made of them, and is not given them again."""
    seen, functions = [], StepFunctions()
    functions.add(lambda record: seen.append(record["step"]))
    functions.reported, functions.lost = 4, {1: "a", 2: "wrong", 3: "wrong too", 4: "wrong as well"}
    log = EventLog(tmp_path / "a-worker0.jsonl", node="a", clock=SystemClock())
    for step, chain in enumerate("abcde", start=1):
        functions.report(StepLine(step=step, chain=chain), HeartbeatSender(NoPage(), 0), log, lambda: None)
    assert seen == [5]
    assert capsys.readouterr().out.count("steps 2 to 4 were reported before") == 1


def test_an_async_function_is_refused(tmp_path):
    """It would return at once, and report nothing: also one that does not look like one."""

    async def track(record):
        pass

    with pytest.raises(UsageError, match="async"):
        StepFunctions().add(track)
    functions = StepFunctions()
    functions.add(partial(lambda do, record: do(record), track))
    log = EventLog(tmp_path / "a-worker0.jsonl", node="a", clock=SystemClock())
    with pytest.raises(UsageError, match="async"):
        functions.report(StepLine(step=1), HeartbeatSender(NoPage(), 0), log, lambda: None)


class Tracker:
    """Does not answer from a step on."""

    def __init__(self, url, from_step):
        self.url, self.from_step = url, from_step

    def __call__(self, record):
        if record["step"] >= self.from_step:
            raise OSError(f"no answer of {self.url}")


def put(url, from_step, record):
    Tracker(url, from_step)(record)


@pytest.mark.parametrize(
    "make",
    [
        Tracker,
        lambda *words: partial(put, *words),
        lambda *words: lambda record: put(*words, record),
    ],
    ids=["instances", "partials", "lambdas"],
)
def test_functions_of_one_name_are_counted_and_told_apart(make, tmp_path, capsys):
    """One fails at each step, the other at the third: both tracebacks are shown."""
    functions = StepFunctions()
    functions.add(make("first", 1))
    functions.add(make("second", 3))
    log = EventLog(tmp_path / "a-worker0.jsonl", node="a", clock=SystemClock())
    for step in range(1, 5):
        functions.report(StepLine(step=step), HeartbeatSender(NoPage(), 0), log, lambda: None)

    assert [(each["step"], each["message"]) for each in events(tmp_path)] == [
        (1, "OSError: no answer of first"),
        (3, "OSError: no answer of second"),
    ]
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == 2
    told = functions.told_at_the_end(tmp_path, generation=0).split("; ")
    assert [each.partition(" failed at ")[2] for each in told] == [
        "4 steps in this process",
        "2 steps in this process",
    ]


def test_a_function_that_failed_before_a_restart_is_told_of_at_the_end(tmp_path):
    """It failed in two generations before this one, in which it fails as well or does not."""

    def track(record):
        if record["step"] in (9, 10, 15, 16, 22):
            raise OSError("no answer")

    functions = StepFunctions()
    for generation, steps in ((1, (8, 9, 10)), (2, (14, 15, 16)), (3, (20, 21))):
        functions = StepFunctions()
        functions.add(track)
        log = EventLog(tmp_path / "a-worker0.jsonl", node="a", clock=SystemClock())
        log.generation = generation
        for step in steps:
            functions.report(StepLine(step=step), HeartbeatSender(NoPage(), 0), log, lambda: None)
    name = track.__qualname__
    earlier = f"run.on_step: {name} failed in 2 earlier processes, first at step 9"
    assert functions.told_at_the_end(tmp_path, generation=3) == earlier

    functions.report(StepLine(step=22), HeartbeatSender(NoPage(), 0), log, lambda: None)
    own = f"run.on_step: {name} failed at 1 steps in this process"
    assert functions.told_at_the_end(tmp_path, generation=3) == f"{own}; {earlier}"
    assert StepFunctions().told_at_the_end(tmp_path, generation=3) == ""
