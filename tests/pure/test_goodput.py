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
    return goodput.time_spent(generations(events, columns_of(lines), now_s))


SIGN = logged("fault_injected", 109.0, 3, fault="kill", step=0)
FAILED = [started(110.5, 2, "failure"), logged("fault_injected", 120.0, 2, fault="kill", step=8)]
UNTRAINED = [started(103.0, 2, "failure"), started(105.0, 3, "node lost"), SIGN]
LEFT = [logged("run_interrupted", 100.0 + at, 1, f"n{at - 2}", step=2) for at in (3, 4)]
LOST = logged("generation_ended", 103.0, 1, "n2", cause="the generation ended: node lost", step=2)
GAVE_UP = logged("run_interrupted", 120.0, 1, "n2", step=2, gave_up=True)
AGAIN = started(1000.0, 2, "resume")
LOSSES = logged("restored", 1001.0, 2, step=2, lost_steps=38, last_step_s=140.0)

TWO = [step(1, 101.0, 1), step(2, 102.0, 1)]
THREE, LATE = [*TWO, step(3, 1002.0, 2)], [*TWO, step(3, 1004.0, 2)]
EIGHT = [*(step(n, 102.0 + n, 1) for n in range(1, 7)), step(7, 113.0, 2), step(8, 114.5, 2)]


@pytest.mark.parametrize(
    ("later", "lines", "now_s", "useful_paused_s", "badput_s"),
    [
        # Six of eight steps count when generation 2 goes on; its first step begins at 112.0.
        (FAILED, EIGHT, None, (8, 0), {"start": 2, "failure": 4, "between steps": 0.5, "end": 5.5}),
        # A generation without a step is a part of a recovery, the last one of the way to itself.
        (UNTRAINED, [], None, (0, 0), {"failure": 3, "node lost": 6}),
        # A planned stop takes no time: the same command is given again at 1000, or not yet.
        ([*LEFT, AGAIN], THREE, None, (3, 896), {"resume": 3}),
        (LEFT, TWO, 1000.0, (2, 896), {"end": 2}),
        # A wait for a lost node is lost to that, also where it is in vain.
        ([LOST], TWO, 120.0, (2, 0), {"node lost": 18}),
        ([LOST, GAVE_UP, AGAIN], THREE, None, (3, 0), {"node lost": 18, "down": 880, "resume": 1}),
        # All nodes die in step 41, and no event tells; the newest checkpoint is that of step 2.
        ([AGAIN, LOSSES], LATE, None, (3, 0), {"down": 860, "resume": 38 + 3}),
    ],
)
def test_time_goes_to_what_took_it(later, lines, now_s, useful_paused_s, badput_s):
    found = time_spent([started(100.0, 1, "start"), *later], lines, now_s)
    assert ((found.useful_s, found.paused_s), found.badput_s) == (useful_paused_s, badput_s)
    whole_s = useful_paused_s[0] + sum(badput_s.values())
    assert found.goodput == pytest.approx(useful_paused_s[0] / whole_s)


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
    assert time_spent(events, lines, last_s + 7.0).wall_s == pytest.approx(found.wall_s + waits_s)
