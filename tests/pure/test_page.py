"""The page follows from a run, and says what is left out.

That no text of a run leaves its place, a browser shows: tests/process/test_page.py.
"""

import math
from dataclasses import replace

import drawn_runs
import pytest
from drawn_runs import drawn
from hypothesis import given
from hypothesis import strategies as st
from logged import logged, started

from elastic.report import page
from elastic.report.figures import MOST_LETTERS, duration, short
from elastic.report.html_page import html_page

BEGAN = drawn_runs.BEGAN


def plain(text):
    """The narrow space between a number and its unit does not matter to what is said."""
    return text.replace("\u202f", " ").replace("\u00a0", " ")


def steps(first, last, begin, generation=1, **values):
    """Of a second each, from `begin` on."""
    return [
        replace(drawn_runs.line(step, BEGAN + begin + 1 + step - first, generation), seconds=1.0, **values)
        for step in range(first, last + 1)
    ]


# What is said.


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.84, "0.8 s"),
        (423, "7 min 3 s"),
        (3599.7, "1 h"),
        (266_400, "3 d 2 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, words):
    assert plain(duration(seconds)) == words


def test_a_sentence_and_a_timeline_say_what_became_of_a_run():
    """Two generations of ten steps: 2 s before each, a second between them, half a second after.
    Each trains from its first to its last counted step.
    """
    shown = drawn(*drawn_runs.of_generations(2, 10))
    assert plain(shown["headline"]) == "Finished: 20 steps in 10 s."
    assert shown["badput_s"] == {"node lost": 3.0, "start": 2.0, "end": 0.5}
    assert round(shown["goodput"], 3) == 0.476
    timeline = shown["timeline"]
    names = ("begins_s", "trains_s", "trained_s", "ends_s")
    times = [tuple(each[name] - BEGAN for name in names) for each in timeline["generations"]]
    assert times == [(0.0, 2.0, 4.5, 5.5), (5.5, 7.5, 10.0, 10.5)]
    assert len(timeline["commits_s"]) == 2


def test_recoveries_are_told_with_the_longest_first():
    found = drawn(*drawn_runs.of_generations(8, 10))["recoveries"]
    assert (found["number"], found["longest"][0]["why"]) == (7, "node joined")
    totals = [each["total_s"] for each in found["longest"]]
    assert totals == sorted(totals, reverse=True) and totals[0] == found["longest_s"]


def test_a_run_that_failed_or_never_began_says_so():
    events, lines = drawn_runs.of_generations(1, 10)
    failed = logged("run_failed", BEGAN + 9, 1, exit_code=1, reason="ValueError: no.")
    assert plain(drawn([*events[:-1], failed], lines)["headline"]) == (
        "Failed at step 10 of 10 in 9.0 s: ValueError: no."
    )
    shown = drawn([], [])
    assert (shown["headline"], shown["timeline"]) == ("Not begun: no generation has formed yet.", None)


def test_a_run_that_goes_on_is_drawn_up_to_now():
    """While the others wait for a lost node, none is blamed."""
    for events in ([TWO], [TWO, LOST]):
        shown = drawn(events, steps(1, 100, 0.0), now_s=BEGAN + 112)
        assert shown["headline"].endswith("in 1 min 52 s.")
        assert shown["timeline"]["ends_s"] == BEGAN + 112
        assert shown["faults"]["newest"] == []


# What went wrong.

TWO = started(BEGAN, 1, "start", ["a", "b"])
KILLED = logged("worker_exited", BEGAN + 101, 1, "b", rank=1, code=None, signal="SIGKILL")
LOST = logged("generation_ended", BEGAN + 101, 1, "a", cause="node lost", step=100)
GAVE_UP = logged("run_interrupted", BEGAN + 105, 1, "a", step=100, gave_up=True, reason="b is gone")
GIVEN_UP = ("a", "gave up (b is gone); newest checkpoint at step 100")
LEFT = [logged("run_interrupted", BEGAN + 101, 1, node, step=100) for node in "ab"]


@pytest.mark.parametrize(
    ("ends", "cause", "nodes", "told"),
    [
        ([KILLED], "failure", ["a", "b"], [("b", "rank 1 was killed by SIGKILL")]),
        ([LOST], "node lost", ["a"], [("b", "node b lost")]),
        ([], "resume", ["a", "b"], [("", "no node answered")]),
        ([LOST, GAVE_UP], "resume", ["a"], [GIVEN_UP, ("b", "node b lost")]),
        (LEFT, "resume", ["a", "b"], []),
        ([], "node joined", ["a", "b", "c"], []),
    ],
)
def test_what_ended_a_generation_is_told(ends, cause, nodes, told):
    """A hundred steps of a second; the next generation begins at 200 s and trains at 202 s."""
    events = [TWO, *ends, started(BEGAN + 200, 2, cause, nodes)]
    events += [logged("run_finished", BEGAN + 252, 2, "a", steps=150)]
    shown = drawn(events, [*steps(1, 100, 0.0), *steps(101, 150, 202.0, 2)])

    assert [(each["node"], each["text"]) for each in shown["faults"]["newest"]] == told
    gap = {"resume": "down" if told else "stop"}.get(cause, "")
    assert shown["timeline"]["generations"][0]["gap"] == gap


# How much.


def test_of_a_long_run_the_newest_is_drawn_and_the_rest_counted():
    """Each second node is in each second generation, each with a fault and a long message; the
    figures are of all, and the page is small.
    """
    message = "\U0001f525" * 200
    nodes = [f"machine-{at:04}-1-{at:08x}" for at in range(100)]
    events = []
    for generation in range(1, 1001):
        begins = BEGAN + 10 * generation
        events += [
            started(begins, generation, "failure", nodes[generation % 2 :: 2]),
            logged("fault_injected", begins + 0.5, generation, nodes[3], fault=message),
            logged("worker_failed", begins + 9, generation, message=message, traceback=message),
            logged("checkpoint_committed", begins + 1, generation, nodes[3], step=generation),
        ]
    values = {f"{message[:20]} {at}": -math.pi / 10**4 for at in range(30)}
    lines = [
        replace(each, values={key: value * math.sin(each.step) for key, value in values.items()})
        for each in steps(1, 10_000, 0.0)
    ]
    found = drawn(events, lines, name=message)
    shown = found["timeline"]

    assert [each["generation"] for each in shown["generations"]] == [*range(501, 1001)]
    assert (shown["num_generations"], shown["num_nodes"]) == (1000, 100)
    assert len(shown["commits_s"]) == len(shown["marks"]) == 500 < shown["num_marks"]
    assert len(shown["lanes"]) == page.MOST_NODES
    assert (found["recoveries"]["number"], len(found["recoveries"]["longest"])) == (1000, 20)
    assert found["checkpoints"]["committed"] == 1000
    assert len(html_page(found).encode()) < 2_000_000
    assert found["curves"]["names_left_out"] == 10


@given(st.text(max_size=400))
def test_no_text_is_longer_than_its_limit_or_commands_a_reader(text):
    shown = short(text)
    assert len(shown) <= MOST_LETTERS
    assert all(each.isprintable() or each in "\n\t" for each in shown)


@pytest.mark.parametrize("command", ["report {} --html", "diff {} {} --html"])
def test_a_page_takes_no_name_of_a_recipe(command, tmp_path, printed):
    run = drawn_runs.write(tmp_path / "run", *drawn_runs.of_generations(2, 3))
    words = command.replace("{}", str(run)).split()
    (recipe := tmp_path / "recipe.py").write_text("import torch\n")
    assert "expected a FILE behind --html that ends in .html" in printed(2, *words, recipe)
    assert recipe.read_text() == "import torch\n"
    for _ in range(2):
        printed(0, *words, tmp_path / "page.html")
