"""What a function of run.on_step raises, whatever it is, is said once and ends nothing."""

import pytest
from run_records import events
from steps import NoPage

from elastic.observe.log import EventLog
from elastic.observe.step_line import StepLine
from elastic.system.clock import SystemClock
from elastic.train.step_functions import StepFunctions
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
    assert "failed at 3 steps" in functions.told_at_the_end()
    capsys.readouterr()
