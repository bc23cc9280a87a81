import io

from elastic.config.run_dir import RunDir
from elastic.events import RunStarted
from elastic.observe.console import LINE_LIMIT, ConsoleFollower
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock


def follower_of(tmp_path, out, clock=None):
    return ConsoleFollower(RunDir.parse(str(tmp_path)), "n", out, clock or SystemClock())


class ClosedPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(text)


def test_a_closed_console_ends_the_thread_and_nothing_else(tmp_path, capfd):
    """stdout was piped into a program that went away: the first print raises inside the thread."""
    follower = follower_of(tmp_path, ClosedPipe())
    (tmp_path / "rank0.log").write_text("one\n")
    follower.follow(tmp_path / "rank0.log", "rank0")
    follower.start()
    follower.stop()

    assert "console output ends here" in capfd.readouterr().err


def test_progress_shows_new_steps_sparsely_and_the_runs_length(tmp_path):
    """Steps of an earlier start are in the metrics; to show them would claim progress not made. A
    step a second is shown each five seconds, and the last one at the end.
    """
    run, clock, out = RunDir.parse(str(tmp_path)), FakeClock(), io.StringIO()
    metrics = Metrics(run.metrics, generation=1)
    metrics.append(StepLine(step=6, loss=1.0))
    log = EventLog(run.events / "n.jsonl", node="n", clock=SystemClock())
    log.record(RunStarted(steps=20, epochs=1, seed=0, global_batch=8, shards=8))
    follower = follower_of(tmp_path, out, clock)
    for step in range(7, 15):
        follower._poll()
        clock.sleep(1.0)
        metrics.append(StepLine(step=step, loss=0.123, world_size=2, generation=1))
    follower._show_progress(is_last=True)
    assert out.getvalue().splitlines() == [
        f"step {step}/20 loss 0.123 world 2 generation 1" for step in (7, 12, 14)
    ]


def test_lines_appear_whole_in_order_cut_and_with_a_prefix(tmp_path):
    """The log appears after it is followed. Its last line has no end because its writer was killed,
    and is shown at the end, as far as the limit.
    """
    screen = io.StringIO()
    follower = follower_of(tmp_path, screen)
    follower.start()
    follower.follow(tmp_path / "log", "rank0")
    (tmp_path / "log").write_text(
        "y" * (3 * LINE_LIMIT) + "\nnext\nbar 1%\rbar 99%\n" + "z" * LINE_LIMIT + "z"
    )
    follower.stop()

    long, *others, endless = screen.getvalue().splitlines()
    assert long.startswith("[rank0] " + "y" * LINE_LIMIT + " (cut, 8000 more")
    assert others == ["[rank0] next", "[rank0] bar 99%"]
    assert endless == "[rank0] " + "z" * LINE_LIMIT
