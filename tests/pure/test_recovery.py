"""What a recovery cost is told in phases that add up, and in one line, and is never negative."""

from dataclasses import replace
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logged import logged, started, step

from elastic.events import FaultInjected, WorkerExited
from elastic.observe.generations import generations
from elastic.observe.goodput import time_spent
from elastic.observe.recovery import recoveries
from elastic.observe.step_columns import columns_of

by_time = attrgetter("time")


def exited(time, generation, rank, **rest):
    return logged("worker_exited", time, generation, rank=rank, **rest)


def back(time, generation, first_s, *, source="snapshot", step=6, lost_steps=0, **rest):
    about = {"source": source, "step": step, "lost_steps": lost_steps, "seconds": 0.1} | rest
    return [logged("restored", time, generation, **about), logged("first_step", first_s, generation, step=7)]


def begun_in(events, lines):
    return generations(sorted(events, key=by_time), columns_of(lines))


def found_in(events, lines):
    return recoveries(begun_in(events, lines))


LINES = [step(n, 100.0 + n, 1) for n in range(1, 7)]
KILLED = [
    started(100.0, 1, "start"),
    logged("first_step", 101.0, step=1),
    logged("fault_injected", 106.6, fault="kill", step=6),
    exited(106.9, 1, 1, signal="SIGKILL"),
    logged("generation_ended", 107.0, cause="failure", step=6),
    started(107.1, 2, "failure"),
    *back(107.2, 2, 107.5, source="checkpoint", step=4, lost_steps=2),
]


def test_phases_lie_between_the_events_and_add_up():
    (found,) = found_in(KILLED, LINES)
    phases = (found.detect_s, found.rendezvous_s, found.down_s, found.restore_s, found.first_step_s)
    assert phases == tuple(map(pytest.approx, (0.4, 0.1, 0.0, 0.1, 0.3)))
    assert found.total_s == pytest.approx(0.9)
    assert (found.cause, found.source, found.lost_steps, found.tries) == ("failure", "checkpoint", 2, 1)
    assert (found.generation, found.step, found.ended_s) == (2, 7, 107.5)
    assert found.line == "back at step 7 after 0.90 s: rank 1 was killed by SIGKILL, 2 steps lost"


TOO_LATE = {FaultInjected: 102.5, WorkerExited: 107.05}
HUNG = logged("hang_detected", 106.9, rank=1, place="step", silence_s=0.5, limit_s=0.4, reason="r")
VICTIM = exited(106.9, 1, 0, code=70, victim=True)
RAISED = logged("worker_failed", 106.95, rank=0, message="ValueError: no\nmore", traceback="")


@pytest.mark.parametrize(
    ("cause", "signs", "before", "after", "said"),
    [
        ("failure", [VICTIM, KILLED[3]], "ab", "ab", "was killed by SIGKILL"),
        ("failure", [exited(106.9, 1, 0, code=1), RAISED], "ab", "ab", "rank 0 failed (ValueError: no)"),
        ("failure", [exited(106.9, 1, 0, code=3)], "ab", "ab", "rank 0 failed (exit code 3)"),
        ("failure", [HUNG, KILLED[3]], "ab", "ab", "after 0.86 s: rank 1 hung"),
        ("failure", [VICTIM], "ab", "ab", "after 0.36 s: failure"),
        ("node lost", [], "ab", "a", "node lost: b"),
        ("node left", [], "abc", "a", "node left: b, c"),
        ("node joined", [], "a", "ab", "node joined: b"),
    ],
)
def test_the_line_says_why(cause, signs, before, after, said):
    events = [
        started(100.0, 1, "start", before),
        *signs,
        logged("generation_ended", 107.0, cause=cause, step=6),
        started(107.1, 2, cause, after),
        *back(107.2, 2, 107.26, lost_steps=1),
    ]
    (found,) = found_in(events, LINES)
    assert found.line.startswith("back at step 7 after ")
    assert found.line.endswith(f"{said}, 1 step lost")
    (unfinished,) = found_in(events[:-1], LINES)
    assert (unfinished.line, unfinished.total_s) == ("", None)


@pytest.mark.parametrize(
    ("change", "detect_s"),
    [
        # A slow disk that the group survived is not the cause of a later end.
        (lambda e: replace(e, time=102.5) if isinstance(e.event, FaultInjected) else e, 0.1),
        # The others gave a silent node up, and then killed their workers: the last step tells when.
        (lambda e: replace(e, time=TOO_LATE.get(type(e.event), e.time)), 1.0),
        (lambda e: HUNG if isinstance(e.event, FaultInjected) else e, 107.0 - 106.4),
    ],
)
def test_the_first_sign_of_a_fault_dates_it(change, detect_s):
    (found,) = found_in([change(each) for each in KILLED], LINES)
    assert found.detect_s == pytest.approx(detect_s)


def test_a_node_that_fell_silent_did_so_at_the_last_step():
    """Also where a later fall-back loses that step and its line."""
    events = [
        started(100.0, 1, "start"),
        logged("generation_ended", 109.0, 1, cause="node lost", step=6),
        started(109.5, 2, "node lost", "a"),
        *back(110.0, 2, 111.0, last_step_s=106.0),
    ]
    later = [started(200.0, 3, "resume", "a"), logged("restored", 201.0, 3, step=3, lost_steps=6)]
    first = found_in(events, [*LINES, step(7, 111.0, 2)])[0]
    assert (first.detect_s, first.total_s) == (3.0, 5.0)
    assert found_in([*events, *later], [*LINES[:3], step(4, 202.0, 3)])[0] == first


CHAIN = [
    *KILLED[:2],
    *KILLED[3:5],
    started(107.1, 2, "failure"),
    exited(108.0, 2, 0, code=3),
    logged("generation_ended", 108.1, 2, cause="failure", step=0),
    started(109.0, 3, "failure"),
    logged("restored", 109.5, 3, step=2, source="snapshot", lost_steps=4, seconds=0.1),
    exited(111.0, 3, 0, code=3),
    logged("generation_ended", 111.1, 3, cause="failure", step=4),
    started(113.1, 4, "failure"),
    *back(113.5, 4, 115.4, step=2, lost_steps=2),
]


def test_a_chain_of_faults_is_told_from_the_first_of_them_on():
    """Two generations between were ended by faults of their own before they brought a new step."""
    *tries, last = found_in(CHAIN, LINES)
    assert [(each.total_s, each.line, each.lost_steps) for each in tries] == [(None, "", 0), (None, "", 4)]
    assert (last.total_s, last.tries, last.lost_steps) == (pytest.approx(8.5), 3, 2)
    said = "back at step 7 after 8.50 s in 3 tries: rank 1 was killed by SIGKILL, 6 steps lost"
    assert last.line == said
    assert last.detect_s + last.rendezvous_s == pytest.approx(2.1)  # the phases are its own


def test_a_chain_begins_behind_a_planned_stop():
    """How long the run lay still depends on the user; the try that then failed counts."""
    stops = [logged("run_interrupted", 107.05, 1, node=node, step=6) for node in ("n1", "n2")]
    events = [
        *CHAIN[:2],
        CHAIN[3],
        *stops,
        started(50_000.0, 2, "resume"),
        exited(50_001.0, 2, 0, code=3),
        started(50_002.0, 3, "failure"),
        *back(50_002.5, 3, 50_003.0),
    ]
    found = found_in(events, LINES)
    assert found[0].detect_s is None
    assert found[1].line == "back at step 7 after 3.00 s in 2 tries: resume, 0 steps lost"


@pytest.mark.parametrize(
    ("gave_up", "rendezvous_s", "down_s"), [(True, 20.0, 28_800.0), (False, None, 28_820.0)]
)
def test_time_without_a_node_is_told_apart(gave_up, rendezvous_s, down_s):
    """The group gave up 20 s after it had lost a node, or lost power; the command was given again 8
    hours later. What no event tells is None, not zero.
    """
    told = [
        logged("generation_ended", 107.0, node="a", cause="the generation ended: node lost", step=6),
        logged("run_interrupted", 127.0, node="a", step=6, reason="b is away", gave_up=True),
    ]
    events = [
        started(100.0, 1, "start"),
        *(told if gave_up else [logged("run_started", 107.0, steps=9)]),
        started(28_927.0, 2, "resume"),
        *back(28_927.2, 2, 28_928.0),
    ]
    (found,) = found_in(events, LINES)
    assert found.rendezvous_s == rendezvous_s
    assert found.down_s == pytest.approx(down_s)
    assert "of it no node answered): resume, 0 steps lost" in found.line
    assert time_spent(begun_in(events, LINES)).badput_s["down"] == found.down_s


NAMES = (
    *("fault_injected", "worker_exited", "generation_ended", "drain_requested", "run_interrupted"),
    *("restored", "first_step"),
)
CAUSES = ("resume", "failure", "node lost", "node joined", "node left")


@st.composite
def histories(draw):
    """Events in any order, because clocks disagree; only generations start in their order."""
    times = sorted(draw(st.lists(st.floats(0, 100), min_size=1, max_size=4)))
    events = [
        # At an object store a node has its own events alone, and perhaps not those of the start.
        started(t, g, draw(st.sampled_from(("start", "resume") if g == 1 else CAUSES)))
        for g, t in enumerate(times, start=1)
    ]
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=14)):
        fields = {"lost_steps": draw(st.integers(0, 5))} if name == "restored" else {}
        events.append(logged(name, draw(st.floats(0, 100)), draw(st.integers(1, len(times))), **fields))
    metrics = [
        step(n, draw(st.floats(0, 100)), draw(st.integers(1, len(times))), seconds=draw(st.floats(0, 50)))
        for n in range(1, draw(st.integers(0, 5)) + 1)
    ]
    return sorted(events, key=by_time), metrics


@given(histories())
def test_phases_add_up_and_no_duration_is_negative(history):
    """Clocks that disagree, missing events, steps that claim more time than passed."""
    begun = begun_in(*history)
    found, spent = recoveries(begun), time_spent(begun)

    assert len(found) == sum(each.cause != "start" for each in begun)
    assert spent.goodput is None or 0 <= spent.goodput <= 1
    assert all(seconds > 0 for seconds in spent.badput_s.values())
    assert sum(each.down_s for each in found) <= spent.badput_s.get("down", 0.0) + 1e-9
    for each in found:
        phases = [each.detect_s, each.rendezvous_s, each.down_s, each.restore_s, each.first_step_s]
        assert all(phase is None or phase >= 0 for phase in phases)
        least_s = sum(phase or 0.0 for phase in phases)
        assert each.total_s is None or each.total_s >= least_s - 1e-9
        if None not in (each.total_s, *phases) and each.tries == 1:
            assert each.total_s == pytest.approx(least_s)
