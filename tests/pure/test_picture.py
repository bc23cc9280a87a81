"""A picture follows from a run, has what stands out in it, and is bounded whatever its length."""

import json
import math
import re
from dataclasses import asdict

import drawn_runs
import numpy as np
import pytest
from drawn_pictures import drawn, series_of
from hypothesis import given
from hypothesis import strategies as st
from logged import logged

from elastic.observe.goodput import time_spent
from elastic.observe.step_batch import floats, with_values
from elastic.observe.step_columns import columns_of
from elastic.observe.step_line import StepLine
from elastic.report.picture import series
from elastic.report.picture.headline import headline, time_went_to
from elastic.report.picture.marks import both_ends
from elastic.report.picture.page import document, page, policy
from elastic.report.picture.thinned import Thinned
from elastic.report.picture.words import duration, grouped
from elastic.report.report import summarise
from elastic.report.status import status

BEGAN = drawn_runs.BEGAN


def said(events, lines):
    report, spent = summarise(events, lines), time_spent(events, columns_of(lines))
    found = status(events, lines[-1] if lines else None, {}, BEGAN + 1e7)
    # The narrow space between a number and its unit does not matter to what is said.
    return [
        text.replace("\u202f", " ").replace("\u00a0", " ")
        for text in (headline(found, report, spent), time_went_to(report, spent))
    ]


# Points.

values = st.none() | st.floats(-1e9, 1e9)


@given(st.lists(values, min_size=1, max_size=400), st.integers(3, 60))
def test_thinning_keeps_every_extreme_every_gap_and_the_newest_point(found, most):
    points = [(float(at), value) for at, value in enumerate(found, 1)]
    shown = series.of_points("x", points, most=most)
    finite = [value for value in found if value is not None]
    digits = pytest.approx if finite else list

    assert len(shown.at) <= most + 1
    assert shown.at == sorted(set(shown.at))
    assert shown.at[-1] == points[-1][0]
    assert (None in shown.values) == (None in found)
    assert shown.gaps == len(found) - len(finite)
    if finite:
        kept = [value for value in shown.values if value is not None]
        assert min(kept) == digits(min(finite), rel=1e-5)
        assert max(kept) == digits(max(finite), rel=1e-5)


def thinned_at_once(found, most):
    """The definition: buckets of the smallest power of two of which there are few enough."""
    points = [*enumerate(found, 1)]
    bucket = 1
    while len(points) > most and math.ceil(len(points) / bucket) > most // 3:
        bucket *= 2
    kept = []
    for begin in range(0, len(points), bucket):
        own = points[begin : begin + bucket]
        finite = [point for point in own if point[1] is not None]
        ends = [f(finite, key=lambda point: point[1]) for f in (min, max) if finite]
        gaps = [point for point in own if point[1] is None][:1]
        kept += sorted({*ends, *gaps}, key=lambda point: point[0])
    return kept if kept[-1:] == points[-1:] else [*kept, points[-1]], bucket


@given(st.lists(values, min_size=1, max_size=400), st.integers(3, 60), st.lists(st.integers(0, 90)))
def test_parts_of_any_size_are_thinned_as_the_whole_is(found, most, sizes):
    thinned, begin = Thinned(most), 0
    for size in [*sizes, len(found)]:
        part = found[begin : begin + size]
        thinned.extend(np.arange(begin + 1, begin + 1 + len(part)), floats(part))
        begin += len(part)

    assert (thinned.points(), thinned.bucket) == thinned_at_once(found, most)
    assert thinned.gaps == found.count(None)
    assert thinned.first_gap == (found.index(None) + 1 if None in found else None)


def test_one_spike_in_a_hundred_thousand_steps_is_drawn_at_its_step():
    points = [(step, 9.0 if step == 54_321 else 1.0) for step in range(1, 100_001)]
    shown = series.of_points("loss", points)

    assert (54_321, 9.0) in zip(shown.at, shown.values, strict=True)
    assert shown.bucket > 1


def test_a_loss_that_is_not_finite_is_a_gap_and_counted():
    lines = [StepLine(step=step, loss=None if step in (3, 4) else 0.5) for step in range(1, 7)]
    (loss,), _ = series_of(lines).logged()

    assert loss.values == [0.5, 0.5, None, None, 0.5, 0.5]
    assert (loss.gaps, loss.first_gap) == (2, 3)


def test_a_recipe_without_a_loss_has_no_chart_of_one():
    found, _ = series_of([StepLine(step=1, values={"reward": 1.0})]).logged()
    assert [each.name for each in found] == ["reward"]


def test_what_is_logged_and_no_number_is_not_drawn_but_named():
    logged_values = {"a": "text", "c": [1], "d": 10**400, "e": float("inf"), "f": 2, "g": None}
    found = series_of([StepLine(step=1, values=logged_values)])

    assert {each.name: each.values for each in found.logged()[0]} == {"d": [None], "e": [None], "f": [2.0]}
    assert found.without_number == ["a", "c", "g"]


def test_a_name_is_without_number_until_its_first_one():
    found = series_of([StepLine(step=1, values={"best": None, "note": "x"})])
    found.add(with_values([StepLine(step=2, values={"best": 0.5, "note": "y"}), StepLine(step=3)]))

    assert [each.name for each in found.logged()[0]] == ["best"]
    assert found.without_number == ["note"]


def test_a_boolean_is_drawn_as_one_or_zero():
    lines = [StepLine(step=step, values={"flag": step > 2, "late": step > 1 or 0.5}) for step in (1, 2, 3)]
    found = series_of(lines).logged()[0]

    assert {each.name: each.values for each in found} == {"flag": [0.0, 0.0, 1.0], "late": [0.5, 1.0, 1.0]}


def test_which_names_are_drawn_does_not_depend_on_how_many_steps_come_at_once():
    """A name has its turn with its first number, and not with a value that is none."""
    names = [f"v{place:02}" for place in range(series.MOST_NAMES + 2)]
    lines = [
        StepLine(
            step=step,
            values={name: None if place < 5 and step == 1 else 1.0 for place, name in enumerate(names)},
        )
        for step in (1, 2)
    ]
    parts = series.RunSeries()
    for line in lines:
        parts.add(with_values([line]))
    whole = series.RunSeries()
    whole.add(with_values(lines))
    assert whole.logged() == parts.logged()
    assert [each.name for each in whole.logged()[0]] == [*names[5:], *names[:3]]


def test_names_beyond_the_limit_are_counted():
    lines = [StepLine(step=1, values={f"v{at}": 1.0 for at in range(series.MOST_NAMES + 5)})]
    found, left_out = series_of(lines).logged()
    assert (len(found), left_out) == (series.MOST_NAMES, 5)


# Words.


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.84, "0.8 s"),
        (41.2, "41 s"),
        (423, "7 min 3 s"),
        (3599.7, "1 h"),
        (27_660, "7 h 41 min"),
        (7199, "2 h"),
        (266_400, "3 d 2 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, words):
    assert duration(seconds).replace("\u202f", " ").replace("\u00a0", " ") == words


def test_numbers_are_grouped_from_five_digits_on():
    assert [grouped(1234), grouped(12_345)] == ["1234", "12\u202f345"]


def test_the_headline_says_what_became_of_the_run_and_what_it_cost():
    """Two generations of ten steps: 2 s before each, a second between them, half a second after."""
    events, lines = drawn_runs.of_generations(2, 10)
    assert said(events, lines) == [
        "Finished: 20 steps in 10 s.",
        "47.6 % of the time was training; 3.0 s went to 1 lost node, 2.0 s to the start and 0.5 s to the end.",
    ]


def test_the_headline_of_a_run_that_failed_has_the_reason():
    events, lines = drawn_runs.of_generations(1, 10)
    failed = logged("run_failed", BEGAN + 9, 1, exit_code=1, reason="ValueError: no.")
    events = [*events[:-1], failed]
    assert said(events, lines)[0] == "Failed at step 10 of 10 after 9.0 s: ValueError: no."


def test_the_headline_of_a_run_that_never_began_says_so():
    assert said([], []) == ["Not begun: no generation has formed yet.", ""]


# The timeline.


def test_a_node_that_comes_back_goes_on_in_the_lane_of_its_machine():
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a-1-00000001", "b-1-00000002"]),
        drawn_runs.started(BEGAN + 10, 2, "node lost", ["b-1-00000002"]),
        drawn_runs.started(BEGAN + 20, 3, "node joined", ["b-1-00000002", "a-7-00000003"]),
    ]
    shown = drawn(events, []).timeline
    assert [(lane.name, lane.nodes, lane.spans) for lane in shown.lanes] == [
        ("a", 2, [(0, 0), (2, 2)]),
        ("b-1-00000002", 1, [(0, 2)]),
    ]


def test_two_nodes_of_one_machine_at_a_time_have_a_lane_each():
    events = [drawn_runs.started(BEGAN, 1, "start", ["a-1-00000001", "a-2-00000002"])]
    assert len(drawn(events, []).timeline.lanes) == 2


def test_a_generation_trains_from_its_first_step_that_counts_to_its_last_one():
    shown = drawn(*drawn_runs.of_generations(2, 10)).timeline
    times = [(each.begins, each.trains, each.trained, each.ends) for each in shown.generations]
    assert times == [(0.0, 2.0, 4.5, 5.5), (5.5, 7.5, 10.0, 10.5)]


def test_a_planned_stop_is_no_part_of_the_generation_before_it():
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a"]),
        logged("run_interrupted", BEGAN + 30, 1, "a", step=5),
        drawn_runs.started(BEGAN + 5000, 2, "resume", ["b"]),
    ]
    first, second = drawn(events, []).timeline.generations
    assert (first.ends, second.begins) == (30.0, 5000.0)


def test_the_age_of_the_newest_checkpoint_falls_at_each_commit_and_rests_while_the_run_does():
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a"]),
        logged("checkpoint_committed", BEGAN + 10, 1, "a", step=5),
        logged("run_interrupted", BEGAN + 30, 1, "a", step=5),
        drawn_runs.started(BEGAN + 5000, 2, "resume", ["a"]),
        logged("run_failed", BEGAN + 5007, 2, "a"),
    ]
    found = drawn(events, []).checkpoints
    assert found.longest_age == 27.0
    assert [*zip(found.age.at, found.age.values, strict=True)] == [
        (0.0, 0.0),
        (10.0, 10.0),
        (10.0, 0.0),
        (30.0, 20.0),
        (5000.0, None),
        (5000.0, 20.0),
        (5007.0, 27.0),
    ]


def test_workers_that_end_as_they_should_leave_no_mark():
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a"]),
        logged("worker_exited", BEGAN + 1, 1, "a", rank=0, code=0, signal=None),
        logged("worker_exited", BEGAN + 1, 1, "a", rank=0, code=75, signal=None),
        logged("worker_exited", BEGAN + 2, 1, "a", rank=1, code=1, signal=None, victim=True),
        logged("worker_exited", BEGAN + 3, 1, "a", rank=2, code=None, signal="SIGKILL"),
        logged("run_finished", BEGAN + 4, 1, "a", steps=5),
    ]
    marks = drawn(events, []).timeline.marks
    assert [mark.text for mark in marks] == ["rank 2 ended: SIGKILL", "finished after step 5"]


def test_a_node_that_died_without_a_word_has_a_mark_where_the_others_noticed():
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a", "b"]),
        logged("generation_ended", BEGAN + 7, 1, "a", cause="node lost", step=3),
        drawn_runs.started(BEGAN + 9, 2, "node lost", ["a"]),
    ]
    (mark,) = drawn(events, [], now_s=BEGAN + 10).timeline.marks
    assert (mark.at, mark.lane, mark.text) == (7.0, 1, "node lost: b")


@given(st.lists(st.integers()), st.integers(2, 20))
def test_what_is_left_out_is_in_the_middle_and_counted(items, most):
    shown, left_out = both_ends(items, most)
    assert len(shown) + left_out == len(items)
    assert len(shown) <= most
    assert shown[:1] == items[:1]
    assert shown[-1:] == items[-1:]


# Safety.


def test_no_text_of_a_run_ends_an_element_of_the_page():
    """Each script element ends where the page ends it: after the picture, and after each file."""
    calm = page(drawn(*drawn_runs.of_generations(1, 2)))
    text = page(drawn(*drawn_runs.hostile(), name=drawn_runs.HOSTILE))

    assert text.count("</script") == calm.count("</script")
    assert "<img" not in text
    assert "\u2028" not in text


def test_the_document_is_json_that_a_parser_takes_back():
    found = drawn(*drawn_runs.hostile(), name=drawn_runs.HOSTILE)
    assert json.loads(document(found)) == json.loads(json.dumps(asdict(found)))


def test_the_page_asks_for_nothing_and_runs_its_own_scripts_alone():
    text = page(drawn(*drawn_runs.of_generations(1, 2)))

    assert "default-src 'none'" in policy(polls=False)
    assert "unsafe" not in policy(polls=True)
    assert "connect-src" not in policy(polls=False)
    assert not re.search(r"""<[^>]*\s(?:on\w+|style|src|href)\s*=""", text[: text.index("<script")])
