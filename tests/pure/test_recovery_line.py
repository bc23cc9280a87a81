"""The console says in one line what each recovery cost, and why it was."""

import pytest
from logged import logged

from elastic.observe.generations import generations
from elastic.observe.recovery import recoveries as recoveries_of
from elastic.observe.step_columns import columns_of
from elastic.observe.step_line import StepLine

LINES = [StepLine(step=n, time=100.0 + n, generation=1, seconds=1.0) for n in range(1, 7)]


def recoveries(events, trained):
    return recoveries_of(generations(events, trained))


def recovery_line(events, trained, generation):
    return next((each.line for each in recoveries(events, trained) if each.generation == generation), "")


def started(time, generation, cause, nodes):
    return logged("generation_started", time, generation, world_size=2, nodes=nodes, cause=cause)


def history(cause, *signs, before=("a", "b"), after=("a", "b"), lost=0):
    return [
        started(100.0, 1, "start", [*before]),
        *signs,
        logged("generation_ended", 107.0, cause=cause, step=6),
        started(107.1, 2, cause, [*after]),
        logged("restored", 107.2, 2, step=6, source="snapshot", lost_steps=lost, seconds=0.1),
        logged("first_step", 107.26, 2, step=7),
    ]


def exited(rank, code=None, signal=None, victim=False):
    return logged("worker_exited", 106.9, rank=rank, pid=7, code=code, signal=signal, victim=victim)


KILLED = exited(1, signal="SIGKILL")
VICTIM = exited(0, code=70, victim=True)
RAISED = logged("worker_failed", 106.95, rank=0, message="ValueError: no\nmore", traceback="")
HUNG = logged(
    "hang_detected", 106.9, rank=1, place="step", silence_s=0.5, limit_s=0.4, reason="it stands still"
)


@pytest.mark.parametrize(
    ("cause", "signs", "nodes", "said"),
    [
        ("failure", [VICTIM, KILLED], {}, "after 0.36 s: rank 1 was killed by SIGKILL, 0 steps lost"),
        ("failure", [exited(0, code=1), RAISED], {}, "rank 0 failed (ValueError: no), 0 steps lost"),
        ("failure", [exited(0, code=3)], {}, "rank 0 failed (exit code 3), 0 steps lost"),
        ("failure", [HUNG, KILLED], {}, "after 0.86 s: rank 1 hung, 0 steps lost"),
        ("failure", [VICTIM], {}, "after 0.36 s: failure, 0 steps lost"),
        ("node lost", [], {"after": ["a"]}, "node b lost, 0 steps lost"),
        ("node left", [], {"before": ["a", "b", "c"], "after": ["a"]}, "nodes b, c left, 0 steps lost"),
        ("node joined", [], {"before": ["a"]}, "node b joined, 0 steps lost"),
        ("node joined", [], {"lost": 1}, "node joined, 1 step lost"),
    ],
)
def test_the_line_says_where_the_run_is_back_and_why(cause, signs, nodes, said):
    line = recovery_line(history(cause, *signs, **nodes), columns_of(LINES), 2)
    assert line.startswith("back at step 7 after ")
    assert line.endswith(said)


def test_a_start_is_no_recovery_and_a_recovery_without_a_new_step_is_none_yet():
    events = history("failure", KILLED)
    assert recovery_line(events, columns_of(LINES), 1) == ""
    assert recovery_line(events[:-1], columns_of(LINES), 2) == ""


CHAIN = [
    started(100.0, 1, "start", ["a"]),
    logged("first_step", 101.0, 1, step=1),
    exited(1, signal="SIGKILL"),
    logged("generation_ended", 107.0, 1, cause="failure", step=6),
    started(107.1, 2, "failure", ["a"]),
    logged("worker_exited", 108.0, 2, rank=0, pid=8, code=3, signal=None, victim=False),
    logged("generation_ended", 108.1, 2, cause="failure", step=0),
    started(109.0, 3, "failure", ["a"]),
    logged("restored", 109.5, 3, step=2, source="snapshot", lost_steps=4, seconds=0.1),
    logged("worker_exited", 111.0, 3, rank=0, pid=9, code=3, signal=None, victim=False),
    logged("generation_ended", 111.1, 3, cause="failure", step=4),
    started(113.1, 4, "failure", ["a"]),
    logged("restored", 113.5, 4, step=2, source="snapshot", lost_steps=2, seconds=0.1),
    logged("first_step", 115.4, 4, step=7),
]


def test_a_chain_of_faults_is_told_from_the_first_of_them_on():
    """Two generations between were ended by faults of their own before they brought a new step."""
    line = recovery_line(CHAIN, columns_of(LINES), 4)
    assert line == "back at step 7 after 8.50 s in 3 tries: rank 1 was killed by SIGKILL, 6 steps lost"
    assert recovery_line(CHAIN, columns_of(LINES), 3) == ""
    found = recoveries(CHAIN, columns_of(LINES))
    assert [(each.total_s, each.tries, each.lost_steps) for each in found] == [
        (None, 1, 0),
        (None, 2, 4),
        (pytest.approx(8.5), 3, 2),
    ]
    assert found[2].detect_s + found[2].rendezvous_s == pytest.approx(2.1)  # the phases are its own


def test_a_chain_begins_behind_a_planned_stop():
    """How long the run lay still depends on the user; the try that then failed counts."""
    stop = logged("run_interrupted", 107.05, 1, node="a", step=6)
    events = [*CHAIN[:2], *CHAIN[3:4], stop, started(50_000.0, 2, "resume", ["a"])]
    events += [
        logged("worker_exited", 50_001.0, 2, rank=0, pid=8, code=3, signal=None, victim=False),
        started(50_002.0, 3, "failure", ["a"]),
        logged("restored", 50_002.5, 3, step=6, source="checkpoint", lost_steps=0, seconds=0.1),
        logged("first_step", 50_003.0, 3, step=7),
    ]
    line = recovery_line(events, columns_of(LINES), 3)
    assert line == "back at step 7 after 3.00 s in 2 tries: resume, 0 steps lost"


def test_time_without_a_node_is_told_apart():
    """The group gave up 20 s after it had lost a node, and the command was given 8 hours later."""
    left = logged("run_interrupted", 127.0, node="a", step=6, reason="b is away", gave_up=True)
    events = [
        started(100.0, 1, "start", ["a", "b"]),
        logged("generation_ended", 107.0, node="a", cause="the generation ended: node lost", step=6),
        left,
        started(28_927.0, 2, "resume", ["a", "b"]),
        logged("restored", 28_927.2, 2, step=6, source="checkpoint", lost_steps=0, seconds=0.1),
        logged("first_step", 28_928.0, 2, step=7),
    ]
    line = recovery_line(events, columns_of(LINES), 2)
    assert line == (
        "back at step 7 after 28822.00 s (for 28800.00 s of it no node answered): resume, 0 steps lost"
    )


def test_a_resume_whose_earlier_generations_this_node_has_not_seen_is_told_too():
    """At an object store a node has its own events alone."""
    line = recovery_line(history("resume")[-3:], columns_of([]), 2)
    assert line == "back at step 7 after 0.16 s: resume, 0 steps lost"
