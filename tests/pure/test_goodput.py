"""Each second of a run went into a step that counts, or to something that has a name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logged import logged, started, step

from elastic.observe import goodput
from elastic.observe.generations import generations, left_as_planned
from elastic.observe.step_columns import columns_of

CAUSES = ("failure", "node lost", "node joined", "node left", "resume")


def time_spent(events, lines, now_s=None):
    return goodput.time_spent(generations(events, columns_of(lines).by_generation(), now_s))


def test_the_time_around_a_restart_belongs_to_its_cause():
    """Six of eight steps count when generation 2 goes on; its first step begins at 112.0."""
    events = [
        started(100.0, 1, "start"),
        started(110.5, 2, "failure"),
        logged("fault_injected", 120.0, 2, fault="kill", step=8),
    ]
    lines = [step(n, 102.0 + n, 1) for n in range(1, 7)] + [step(7, 113.0, 2), step(8, 114.5, 2)]
    found = time_spent(events, lines)
    assert (found.wall_s, found.useful_s) == (20.0, 8.0)
    assert found.badput_s == {"start": 2.0, "failure": 4.0, "between steps": 0.5, "end": 5.5}


def test_a_generation_without_a_step_is_part_of_a_recovery():
    """And the last one, where there is no next, of the way to itself."""
    events = [started(100.0, 1, "start"), started(103.0, 2, "failure"), started(105.0, 3, "node lost")]
    found = time_spent([*events, logged("fault_injected", 109.0, 3, fault="kill", step=0)], [])
    assert found.badput_s == {"failure": 3.0, "node lost": 6.0}
    assert found.goodput == 0.0


def test_a_planned_stop_takes_no_time():
    """The last node leaves at 104; the same command is given again at 1000, or not yet."""
    events = [
        started(100.0, 1, "start"),
        logged("run_interrupted", 103.0, 1, "n1", step=2),
        logged("run_interrupted", 104.0, 1, "n2", step=2),
    ]
    lines = [step(1, 101.0, 1), step(2, 102.0, 1)]
    found = time_spent([*events, started(1000.0, 2, "resume")], [*lines, step(3, 1002.0, 2)])
    assert (found.wall_s, found.useful_s, found.badput_s) == (6.0, 3.0, {"resume": 3.0})
    waits = time_spent(events, lines, now_s=1000.0)
    assert (found.paused_s, waits.paused_s, waits.wall_s) == (896.0, 896.0, 4.0)


@pytest.mark.parametrize("ends", ["gave up", "goes on"])
def test_a_wait_for_a_lost_node_is_lost_to_that(ends):
    """It dies 1 s after the last step; they wait until 120, or still do."""
    events = [
        started(100.0, 1, "start"),
        logged("generation_ended", 103.0, 1, "n2", cause="the generation ended: node lost", step=2),
    ]
    lines = [step(1, 101.0, 1), step(2, 102.0, 1)]
    if ends == "goes on":
        found = time_spent(events, lines, now_s=120.0)
        assert found.badput_s == {"node lost": 18.0}
        return
    gave_up = logged("run_interrupted", 120.0, 1, "n2", step=2, gave_up=True)
    events += [gave_up, started(1000.0, 2, "resume")]
    found = time_spent(events, [*lines, step(3, 1002.0, 2)])
    assert found.badput_s == {"node lost": 18.0, "down": 880.0, "resume": 1.0}


def test_steps_that_were_lost_are_no_time_without_a_node():
    """All nodes die in step 41, and no event tells; the newest checkpoint is that of step 2."""
    restored = {"step": 2, "source": "checkpoint", "lost_steps": 38, "seconds": 0.1}
    events = [
        started(100.0, 1, "start"),
        started(1000.0, 2, "resume"),
        logged("restored", 1001.0, 2, **restored, last_step_s=140.0),
    ]
    found = time_spent(events, [step(1, 101.0, 1), step(2, 102.0, 1), step(3, 1004.0, 2)])
    assert found.badput_s == {"down": 860.0, "resume": 38.0 + 3.0}


@st.composite
def histories(draw):
    """Of one clock: each generation trains some steps, or none, and some are stopped."""
    durations = st.floats(0.0, 5.0)
    now, number, events, lines = draw(durations), 0, [], []
    for generation in range(1, draw(st.integers(1, 6)) + 1):
        events.append(started(now, generation, "start" if generation == 1 else draw(st.sampled_from(CAUSES))))
        for _ in range(draw(st.integers(0, 3))):
            number, seconds = number + 1, draw(durations)
            now += draw(durations) + seconds
            lines.append(step(number, now, generation, seconds))
        now += draw(durations)
        if draw(st.booleans()):
            nodes = draw(st.sampled_from([["n1", "n2"], ["n2"]]))
            events += [logged("run_interrupted", now, generation, node, step=number) for node in nodes]
        now += draw(durations)
    return events, lines


@given(histories())
def test_the_parts_add_up_to_the_whole(history):
    events, lines = history
    found = time_spent(events, lines)
    assert sum(found.badput_s.values()) + found.useful_s == pytest.approx(found.wall_s, abs=1e-6)
    starts = [each for each in events if each.event.name == "generation_started"]
    lefts = [
        left_as_planned([each for each in events if each.generation == start.generation], start)
        for start in starts
    ]
    pauses_s = sum(
        after.time - stop.time
        for stop, after in zip(lefts, starts[1:], strict=False)
        if stop is not None and after.event.cause == "resume"
    )
    last_s = max(each.time for each in [*events, *lines[-1:]])
    assert found.paused_s == pytest.approx(pauses_s)
    assert found.wall_s == pytest.approx(last_s - starts[0].time - pauses_s)
    waits_s = 7.0 if lefts[-1] is None else 0.0
    later = time_spent(events, lines, last_s + 7.0)
    assert later.wall_s == pytest.approx(found.wall_s + waits_s)
