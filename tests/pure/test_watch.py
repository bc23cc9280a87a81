"""What a terminal shows of a run follows from its files, and obeys none of their texts."""

import io
import math
import re

import pytest
from logged import logged, started
from rich.console import Console
from viewed import viewed

from elastic.observe import console
from elastic.observe.step_line import StepLine
from elastic.report.live import drawn

HOSTILE = "b[red]\x1b[31m"
EVENTS = [
    started(100.0, 1, "start", "ab"),
    logged("run_started", 100.5, steps=20),
    *(logged("worker_started", 100.1, 1, node, rank=rank, pid=7) for rank, node in enumerate("ab")),
    logged("worker_exited", 106.9, 1, "b", rank=1, signal="SIGKILL"),
    logged("generation_ended", 107.0, cause="failure", step=6),
    started(107.1, 2, "failure", "ab"),
    *(logged("worker_started", 107.1, 2, node, rank=rank) for rank, node in enumerate(("a", HOSTILE))),
    logged("restored", 107.2, 2, step=6, source="snapshot", lost_steps=0, seconds=0.1),
    logged("first_step", 108.2, 2, step=7),
    logged("checkpoint_committed", 108.5, 2, step=7, size_bytes=1, seconds=0.1, digest="d"),
]
LINES = [StepLine(step=n, time=100.5 + n, generation=1, seconds=1.0, loss=0.5) for n in range(1, 7)]
LINES.append(StepLine(step=7, time=108.2, generation=2, seconds=1.0, loss=0.25))


def shown(events=EVENTS, lines=LINES, now=110.0):
    view = viewed(events, lines, beats=dict.fromkeys((each.node for each in events), 0.5), now=now)
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(drawn("runs/x", view))
    return out.getvalue()


def test_a_run_that_trains_is_shown_with_what_happened_lately():
    text = shown()
    for part in (
        "runs/x  running",
        "7 of 20, about 13 s left",
        "step 7, 1.5 s ago",
        "a generation begins (failure), world size 2",
        "back at step 7 after 1.30 s: rank 1 was killed by SIGKILL, 0 steps lost",
        "checkpoint of step 7 committed",
        "goodput          70.0%",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        *((0.5, "0.5"), (1.23456789, "1.23457"), (3, "3"), (-0.0, "-0"), (10**400, "none")),
        *((None, "none"), (math.nan, "none"), (True, "none"), ("\x1b[31m", "none"), ({"loss": 1}, "none")),
    ],
)
def test_a_loss_has_the_same_words_in_each_view(loss, words):
    """The console's progress line and `watch`; a line of metrics may have any JSON."""
    line = StepLine(step=1, loss=loss, time=100.0, generation=1, world_size=2)
    assert re.search(rf"loss +{re.escape(words)} *\n", shown(lines=[line]))
    assert console.progress_line(line, None) == f"step 1 loss {words} world 2 generation 1"


def test_while_nodes_wait_for_others_no_time_is_left():
    """Also where the run has not begun."""
    text = shown(events=[*EVENTS, logged("generation_ended", 109.0, 2, cause="node lost", step=7)])
    assert "2, 0 workers" in text and " left" not in text
    text = shown(events=[], lines=[])
    assert "0 of an unknown number" in text and "0 workers" in text


def test_the_newest_event_stands_above_and_commands_no_terminal():
    """A small terminal shows the beginning."""
    failed = logged("worker_failed", 109.0, 2, HOSTILE, rank=5, message="uncorrectable ECC")
    out = io.StringIO()
    Console(file=out, width=40).print(drawn("runs/x", viewed([*EVENTS, failed], LINES), "a reason"))
    lines = out.getvalue().splitlines()
    assert "cannot be read now" in lines[1]
    assert "ECC" in "".join(lines[3:6])
    assert "b[red]" in out.getvalue() and "\x1b" not in out.getvalue()
