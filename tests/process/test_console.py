import io
import threading
from dataclasses import dataclass, field

from elastic.config.run_dir import RunDir
from elastic.events import RunStarted
from elastic.observe.console import LINE_LIMIT, BarScreen, ConsoleFollower, PlainScreen
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.system.clock import SystemClock


@dataclass
class RecordingScreen:
    """Keeps what was shown; `seen` is set when the awaited text has arrived."""

    awaited: str = ""
    lines: list[str] = field(default_factory=list)
    shown: list[tuple[int, int | None]] = field(default_factory=list)
    seen: threading.Event = field(default_factory=threading.Event)

    def print_line(self, text):
        self.lines.append(text)
        if self.awaited and self.awaited in text:
            self.seen.set()

    def progress(self, newest, steps, now):
        self.shown.append((newest.step, steps))
        self.seen.set()

    def close(self):
        self.lines.append("closed")


def test_lines_appear_whole_in_order_and_with_their_prefix(tmp_path):
    """The log appears after it is followed, and its last line has no end because its writer was
    killed.
    """
    screen = RecordingScreen(awaited="two")
    follower = ConsoleFollower(RunDir.parse(str(tmp_path)), "n", screen, SystemClock())
    follower.start()
    follower.follow(tmp_path / "rank0.log", "rank0")
    (tmp_path / "rank0.log").write_text("one\ntwo\nthr")
    assert screen.seen.wait(30)

    follower.stop()

    assert screen.lines == ["[rank0] one", "[rank0] two", "[rank0] thr", "closed"]


def test_an_older_generations_log_is_printed_first(tmp_path):
    """Both generations log under the same prefix; the old one has more than one poll reads."""
    (tmp_path / "old.log").write_text("".join(f"old {n:060d}\n" for n in range(9000)))
    (tmp_path / "new.log").write_text("new\n")
    screen = RecordingScreen()
    follower = ConsoleFollower(RunDir.parse(str(tmp_path)), "n", screen, SystemClock())
    follower.follow(tmp_path / "old.log", "rank0")
    follower.follow(tmp_path / "new.log", "rank0")
    follower.print_line("a word of the agent")
    follower.start()

    follower.stop()

    assert len(screen.lines) == 9003
    assert screen.lines[8999:] == [f"[rank0] old {8999:060d}", "a word of the agent", "[rank0] new", "closed"]


class ClosedPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(text)


def test_a_closed_console_ends_the_thread_and_nothing_else(tmp_path, capfd):
    """stdout was piped into a program that went away: the first print raises inside the thread."""
    follower = ConsoleFollower(RunDir.parse(str(tmp_path)), "n", PlainScreen(ClosedPipe()), SystemClock())
    (tmp_path / "rank0.log").write_text("one\n")
    follower.follow(tmp_path / "rank0.log", "rank0")
    follower.start()
    follower.stop()

    assert "console output ends here" in capfd.readouterr().err


def test_progress_shows_only_new_steps_and_the_length_of_the_run(tmp_path):
    """Steps of an earlier start are in the metrics; to show them would claim progress not made."""
    run = RunDir.parse(str(tmp_path))
    metrics = Metrics(run.metrics, generation=1)
    metrics.append(StepLine(step=6, loss=1.0))
    log = EventLog(run.events / "n.jsonl", node="n", clock=SystemClock())
    log.record(RunStarted(steps=20, epochs=1, seed=0, global_batch=8, shards=8))
    screen = RecordingScreen()
    follower = ConsoleFollower(run, "n", screen, SystemClock())
    follower.start()
    metrics.append(StepLine(step=7, loss=0.5))
    assert screen.seen.wait(30)

    follower.stop()

    assert screen.shown == [(7, 20)]


def test_plain_progress_is_sparse_and_shows_the_last_step():
    out = io.StringIO()
    screen = PlainScreen(out)
    for step in range(1, 13):
        screen.progress(StepLine(step=step, loss=0.123, world_size=2, generation=1), 560, now=100.0 + step)
    screen.close()
    screen.close()

    assert out.getvalue().splitlines() == [
        f"step {step}/560 loss 0.123 world 2 generation 1" for step in (1, 6, 11, 12)
    ]


def test_a_bar_leaves_worker_output_as_it_is():
    """Square brackets are markup to the terminal library, and a long line would be wrapped."""
    out = io.StringIO()
    screen = BarScreen(out)
    screen.progress(StepLine(step=1, loss=0.5, world_size=2, generation=1), 10, now=0.0)
    screen.print_line("[rank0] [bold]tensor[/bold] " + "x" * 200)
    screen.close()

    assert "[rank0] [bold]tensor[/bold] " + "x" * 200 in out.getvalue()


def test_an_endless_line_is_cut_and_memory_stays_bounded(tmp_path):
    """A complete line is cut at the limit; a line without an end is shown as far as it goes."""
    (tmp_path / "log").write_text(
        "y" * (3 * LINE_LIMIT) + "\nnext\nbar 1%\rbar 99%\n" + "z" * LINE_LIMIT + "z"
    )
    screen = RecordingScreen(awaited="zzz")
    follower = ConsoleFollower(RunDir.parse(str(tmp_path)), "n", screen, SystemClock())
    follower.follow(tmp_path / "log", "rank0")
    follower.start()
    assert screen.seen.wait(30)
    follower.stop()

    long, *others, endless, _ = screen.lines
    assert long.startswith("[rank0] " + "y" * LINE_LIMIT + " (cut, 8000 more")
    assert others == ["[rank0] next", "[rank0] bar 99%"]
    assert endless == "[rank0] " + "z" * LINE_LIMIT + " (cut, 1 more characters in the log)"
