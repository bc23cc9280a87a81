"""What a function of run.on_step raises, whatever it is, is said once and ends nothing."""

import asyncio

import pytest
from run_records import events
from steps import NoPage

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
        (UnspeakableError(), "UnspeakableError"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
def test_a_functions_error_is_said_once_and_it_is_called_again(tmp_path, capsys, error, said):
    """Of a step that is done again, which was reported before, it is not called again. The same
    from step 3 on for another function of the same name, whose traceback is shown as well.
    """
    seen, functions = [], StepFunctions()

    def failing_from(step):
        def track(record):
            seen.append(record["step"])
            if record["step"] >= step:
                raise error

        return track

    functions.add(failing_from(1))
    functions.add(failing_from(3))
    log = EventLog(tmp_path / "a-worker0.jsonl", node="a", clock=SystemClock())
    for step in (1, 2, 2, 3, 4):
        functions.report(StepLine(step=step), HeartbeatSender(NoPage(), 0), log, lambda: None)
    assert seen == [1, 1, 2, 2, 3, 3, 4, 4]
    found = events(tmp_path)
    assert [(each["event"], each["step"]) for each in found] == [("on_step_failed", step) for step in (1, 3)]
    assert all(said in each["message"] for each in found)
    assert capsys.readouterr().err.count("raised at step") == 2
