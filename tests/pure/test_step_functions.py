"""What a function of run.on_step raises, whatever it is, is said once and ends nothing."""

import asyncio
from functools import partial

import pytest
from run_records import events
from steps import NoPage

from elastic.observe.log import EventLog
from elastic.observe.step_line import StepLine
from elastic.system.clock import SystemClock
from elastic.train.loop.on_step import StepFunctions
from elastic.worker.heartbeat import HeartbeatSender


@pytest.fixture
def report(tmp_path):
    log = EventLog(tmp_path / "a-worker0.jsonl", node="a", clock=SystemClock())

    def report(functions, steps):
        for step in steps:
            functions.report(StepLine(step=step), HeartbeatSender(NoPage(), 0), log, lambda: None)

    return report


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no network"), "ValueError: no network"),
        (SystemExit("cannot log in"), "SystemExit: cannot log in"),
        (UnspeakableError(), "UnspeakableError"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
def test_a_functions_error_is_said_once_and_it_is_called_again(tmp_path, report, error, said):
    """Of a step that is done again, which was reported before, it is not called again."""
    seen, functions = [], StepFunctions()

    def track(record):
        seen.append(record["step"])
        raise error

    functions.add(track)
    report(functions, (1, 2, 2, 3))
    assert seen == [1, 2, 3]
    (event,) = events(tmp_path)
    assert (event["event"], event["step"]) == ("on_step_failed", 1)
    assert said in event["message"]


def test_functions_of_one_name_are_counted_and_told_apart(tmp_path, capsys, report):
    """One does not answer at each step, the other from the third on: both tracebacks are shown."""
    functions = StepFunctions()

    def tracker(url, from_step):
        def track(record):
            if record["step"] >= from_step:
                raise OSError(f"no answer of {url}")

        return track

    functions.add(tracker("first", 1))
    functions.add(partial(tracker("second", 3)))
    report(functions, range(1, 5))
    assert [(each["step"], each["message"]) for each in events(tmp_path)] == [
        (1, "OSError: no answer of first"),
        (3, "OSError: no answer of second"),
    ]
    assert capsys.readouterr().err.count("Traceback") == 2
