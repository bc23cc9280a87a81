"""A page is below a million bytes, however long the run was and whatever its texts are."""

import math
from dataclasses import replace

import drawn_runs
import pytest
from drawn_pictures import drawn, series_of
from hypothesis import given
from hypothesis import strategies as st
from logged import logged

from elastic.observe.step_line import StepLine
from elastic.report.diff import ComparedRun, Difference
from elastic.report.picture import series
from elastic.report.picture.limits import Limits
from elastic.report.picture.page import document, page
from elastic.report.picture.picture import MOST_BYTES, comparison, largest
from elastic.report.picture.timeline import MOST_LANES
from elastic.report.picture.words import MOST_LETTERS, short

BEGAN = drawn_runs.BEGAN
LIMIT_BYTES = 1_000_000
LIMITS = Limits()


def test_the_page_of_a_hundred_thousand_steps_is_below_its_limit():
    events, lines = drawn_runs.of_generations(10, 10_000)
    many = {f"value {at}": math.pi * at for at in range(30)}
    lines = [replace(each, values=each.values | many) for each in lines]

    assert len(page(drawn(events, lines)).encode()) < LIMIT_BYTES


MESSAGES = {
    "japanese": "\u30e1\u30e2\u30ea\u4e0d\u8db3 " * 60,
    "emoji": "\U0001f525\U0001f9ef" * 100,
    "escaped": "<&>" * 60,
}


def worst(message):
    """A thousand generations that each end with this message, and the most names that are drawn."""
    events, lines = drawn_runs.of_generations(1000, 16)
    events += [
        logged(
            "worker_failed",
            each.time - 0.2,
            each.generation,
            each.node,
            rank=0,
            message=message,
            traceback=message,
        )
        for each in events
        if each.event.name == "generation_ended"
    ]
    many = {f"{message[:20]} {at}": -math.pi / 10**4 for at in range(series.MOST_NAMES)}
    own = {"slowest_rank": 1, "slowest_s": 0.123456, "others_s": 0.112345}
    lines = [
        replace(each, **own, values={key: value * math.sin(each.step) for key, value in many.items()})
        for each in lines
    ]
    return sorted(events, key=lambda each: each.time), lines


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_the_page_of_the_worst_run_and_that_of_two_are_below_the_limit_in_bytes(message):
    """What needs the most room is halved until all fits; the figures are those of the run."""
    events, lines = worst(message)
    whole = drawn(events, lines, name=message)
    half = drawn(events, lines, name=message, most_bytes=MOST_BYTES // 2)
    end = ComparedRun(finished=True, steps=16_000, final_digest=None)
    same = Difference(same=True, reason=message, first_difference=None, common_steps=16_000, a=end, b=end)

    assert len(page(whole).encode()) < LIMIT_BYTES
    assert len(page(comparison(same, half, half)).encode()) < LIMIT_BYTES
    for each in (whole, half):
        assert (each.timeline.num_generations, each.recoveries.number) == (1000, 999)
        assert each.step_time.at[-1] == 16_000
    assert min(len(each.at) for each in whole.logged) > 300


def test_a_coarser_view_of_a_series_is_that_of_a_smaller_limit():
    lines = [StepLine(step=step, loss=math.sin(step * step)) for step in range(1, 5000)]
    (coarser,), _ = series_of(lines, 1500).logged(200)
    (direct,), _ = series_of(lines, 200).logged()
    assert coarser == direct


def test_the_picture_of_very_many_generations_nodes_and_faults_is_below_its_limit():
    """Each second node is in each second generation: the most spans that there can be."""
    nodes = [f"machine-{at:04}-1-{at:08x}" for at in range(100)]
    events = []
    for generation in range(1, 1001):
        events += [
            drawn_runs.started(BEGAN + generation, generation, "node lost", nodes[generation % 2 :: 2]),
            logged("fault_injected", BEGAN + generation + 0.5, generation, nodes[3], fault="kill " * 200),
        ]
    found = drawn(events, [])
    shown = found.timeline

    assert len(document(found)) < LIMIT_BYTES * 2 // 3
    assert len(shown.generations) == LIMITS.generations
    assert (len(shown.lanes), shown.lanes_left_out) == (MOST_LANES, 100 - MOST_LANES)
    assert (len(shown.marks), shown.marks_left_out) == (LIMITS.marks, 1000 + 50 * 999 + 1 - LIMITS.marks)
    assert shown.generations_left_out == 1000 - LIMITS.generations


@given(st.text(max_size=400))
def test_no_text_is_longer_than_its_limit_or_commands_a_reader(text):
    shown = short(text)
    assert len(shown) <= MOST_LETTERS
    assert all(each.isprintable() or each in "\n\t" for each in shown)


def test_of_very_many_causes_the_largest_stay_and_the_others_are_one_part():
    found = largest({f"cause {at}": float(at) for at in range(1, 101)} | {"x" * 500: 1.0, "x" * 501: 2.0})
    assert sum(found.values()) == 5053
    assert next(iter(found)) == "cause 100"
    assert [*found][-1] == "other causes"
    assert len(found) == 17


def test_machines_with_faults_are_shown_first_and_a_mark_without_a_lane_names_its_machine():
    """All of them are there all the time; the last ones have the faults."""
    nodes = [f"m{at:03}" for at in range(2 * MOST_LANES)]
    broken = nodes[-MOST_LANES - 1 :]
    events = [
        drawn_runs.started(BEGAN, 1, "start", nodes),
        *(logged("fault_injected", BEGAN + 1, 1, node, fault="kill") for node in broken[1:]),
        *(logged("fault_injected", BEGAN + 2, 1, node, fault="kill") for node in broken[1:]),
        logged("fault_injected", BEGAN + 3, 1, broken[0], fault="kill"),
        logged("run_finished", BEGAN + 4, 1, nodes[0], steps=1),
    ]
    shown = drawn(events, []).timeline

    assert {lane.name for lane in shown.lanes} == {*broken[1:]}
    (without,) = [mark for mark in shown.marks if mark.lane is None and mark.kind == "fault"]
    assert without.text == f"{broken[0]}: injected: kill"
