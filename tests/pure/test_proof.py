"""What two or three computations of a step say, when they are made, and what variables hold."""

import itertools
import random
import sys
import threading
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import ALONE, groups_of
from torch import nn

from elastic.errors import RecipeNotExact
from elastic.observe.log import EventLog
from elastic.proof import evidence
from elastic.proof.evidence import NOTHING, SHOWN, STATE, ComputedStep, Earlier, Evidence
from elastic.proof.rehearsals import is_due
from elastic.proof.step_again import StepAgain
from elastic.proof.variables import MOST_ELEMENTS, Collector, variables_of
from elastic.proof.verdict import Verdict, judge
from elastic.testing.fakes import FakeClock
from elastic.train.state.flat import tensor_checksum

ENTRIES = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), min_size=1).map(Evidence)


def computed(**fields):
    empty = ComputedStep(step=3, generation=1, world_size=1, wall_s=0.0, evidence=Evidence({"a": "x"}))
    return replace(empty, **fields)


def texts(name, value, held=frozenset()):
    collector = Collector(tensor_checksum, lambda: 0.0, set(held))
    collector.add(name, value)
    return collector.texts


@given(ENTRIES, ENTRIES, ENTRIES)
def test_three_computations_say_what_two_cannot(first, second, third):
    assert judge([first, second]) is (Verdict.ALIKE if first == second else Verdict.UNCLEAR)
    if first == second:
        return
    expected = Verdict.RANDOM
    if third == first:
        expected = Verdict.ONCE
    elif third == second:
        expected = Verdict.HIDDEN
    assert judge([first, second, third]) is expected


@given(st.lists(ENTRIES, min_size=1, max_size=4))
def test_computations_are_alike_if_nothing_differs(found):
    """Beside a dumb twin: any two of them differ in a name of the union."""
    names = evidence.differences(*found)
    assert (not names) == all(each == found[0] for each in found) == (len({e.whole for e in found}) == 1)
    union = dict.fromkeys(name for each in found for name in each.entries)
    values = {name: [each.entries.get(name) for each in found] for name in union}
    assert names == [name for name in union if any(a != b for a in values[name] for b in values[name])]


def test_a_variable_counts_where_all_have_it_alike():
    """A best loss that rank 0 alone kept is named: all ranks begin with the same one."""
    one, two = STATE + "1", STATE + "2"
    first = {"t": SHOWN + "0.1", "w": one, "made": one, "clock": one, "n": SHOWN + "1", "best": SHOWN + "3.5"}
    first = computed(variables=first, unsteady=["clock", "best"])
    second = {"t": SHOWN + "0.2", "w": two, "clock": two, "n": SHOWN + "2", "best": SHOWN + "inf"}
    second = computed(variables=second, unsteady=["clock"])
    assert evidence.with_variables([first, second]) == [
        Evidence({"a": "x", "the variable w": one}),
        Evidence({"a": "x", "the variable w": two}),
    ]
    assert list(evidence.not_restored(first, second)) == ["w", "n", "best", "t"], (
        "made is not there, and cannot be read"
    )
    assert evidence.not_restored(first, second)["n"] == "1 then, 2 now"


def test_what_was_perhaps_not_looked_at_is_not_missing():
    first = computed(variables=texts("a", 1) | texts("b", 1) | texts("c", 1))
    late = Collector(tensor_checksum, iter([0.0, 0.0, 1.0, 1.0]).__next__, set())
    for name, value in (("a", 1), ("b", 2), ("c", 1)):
        late.add(name, value)
    assert list(late.texts) == ["a", evidence.CUT]
    assert evidence.not_restored(first, computed(variables=late.texts)) == {}


def test_evidence_counts_once_and_a_damaged_file_for_nothing(tmp_path):
    path, earlier = tmp_path / "evidence", Earlier(is_rehearsal=True, found=[computed()])
    assert evidence.take(path) == NOTHING
    evidence.write(path, earlier)
    assert (evidence.take(path), evidence.take(path)) == (earlier, NOTHING)
    path.write_text("{")
    assert evidence.take(path) == NOTHING
    assert (NOTHING.step, earlier.step) == (0, 3)


def again_at(path, earlier=NOTHING, member=ALONE):
    return StepAgain(
        path=path,
        groups=groups_of(member),
        clock=FakeClock(),
        generation=2,
        log=None,
        events=path.parent,
        recipe="aa",
        accepts=False,
        earlier=earlier,
    )


def newest_of(member, folder):
    path = Path(folder) / str(member.rank)
    evidence.write(path, Earlier(is_rehearsal=False, found=[computed(generation=(2, 5)[member.rank])]))
    return again_at(path, member=member).look().found[-1].generation


def test_evidence_of_an_older_generation_gives_way_on_every_rank(ranks, tmp_path):
    """A node that was away for a generation still has what it left before."""
    assert ranks.run(2, newest_of, str(tmp_path)) == [5, 5]


def test_a_difference_with_no_room_for_a_third_ends_the_run(tmp_path):
    earlier = Earlier(is_rehearsal=True, found=[computed()])
    other = computed(evidence=Evidence({"a": "y"}))
    with pytest.raises(SystemExit):
        again_at(tmp_path / "evidence", earlier).compare(other)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RecipeNotExact, match="step 3 was done again"):
            again_at(tmp_path / "missing" / "evidence", earlier).compare(other)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_variable_that_does_not_come_back_is_named_once(tmp_path, capsys):
    """A list that grew by its length alone."""
    log = EventLog(tmp_path / "n.jsonl", node="n", clock=FakeClock())
    for number in (7, 8):
        earlier = Earlier(is_rehearsal=True, found=[computed(variables=texts("best", [1.0] * number))])
        again = replace(again_at(tmp_path / "evidence", earlier), log=log)
        found = again.compare(computed(variables=texts("best", [1.5] * 9)))
        assert found.not_restored == {"len(best)": f"{number} then, 9 now"}
    assert capsys.readouterr().out.count("does not bring back best") == 1


@pytest.mark.parametrize(
    ("step", "before", "cost_s", "trained_s", "due"),
    [
        (2, [], 1.0, 10.0, False),
        (3, [], 1.0, 10.0, True),
        (3, [], 6.0, 10.0, False),
        (3, [], 6.0, 600.0, True),
        (4, [3], 1.0, 10.0, False),
        (12, [3], 1.0, 10.0, True),
        (15, [12], 1.0, 10.0, False),
        (24, [3, 12], 1.0, 10.0, False),
        (24, [3, 12], 1.0, 100.0, True),
    ],
)
def test_rehearsals_come_early_and_then_cost_at_most_one_percent(step, before, cost_s, trained_s, due):
    assert is_due(step, epoch_end=10, before=before, cost_s=cost_s, trained_s=trained_s) is due


class Meter:
    def __init__(self):
        self.total, self.seen = 0.5, [torch.ones(2)]


@pytest.mark.parametrize(
    ("value", "shown", "state"),
    [
        (1, [""], []),
        (torch.ones(2), [], [""]),
        (np.ones(2), [], [""]),
        (nn.Linear(1, 1), [], [".weight", ".bias"]),
        (random.Random(0), [], [""]),
        (np.random.default_rng(0), [], [""]),
        (torch.Generator(), [], [""]),
        ({"w": torch.ones(1)}, [None], ["['w']"]),
        (Meter(), [".total", None], [".seen[0]"]),
    ],
    ids=["number", "tensor", "array", "module", "random", "numpy", "torch", "dict", "object"],
)
def test_what_must_come_back_is_told_from_what_may_be_shown(value, shown, state):
    """None: the length of a container, whose name begins otherwise."""
    found = texts("x", value)
    kinds = {None if name.startswith("len(") else name[1:]: text for name, text in found.items()}
    assert {name for name, text in kinds.items() if text.startswith(SHOWN)} == set(shown)
    assert {name for name, text in kinds.items() if text.startswith(STATE)} == set(state)


def counter(start, seen=[]):  # noqa: B006 - what it remembers
    count = start

    def after(number):
        nonlocal count
        count += number
        seen.append(number)
        return count

    return after


@pytest.mark.parametrize(
    ("made", "advance"),
    [
        (itertools.count, next),
        (lambda: iter([1, 2, 3]), next),
        (lambda: (each for each in range(9)), next),
        (lambda: counter(1), lambda after: after(1)),
        (lambda: partial(dict, found={}), lambda kept: kept.keywords["found"].update(a=1)),
        (lambda: ContextVar("depth"), lambda depth: depth.set(1)),
        (threading.local, lambda local: setattr(local, "depth", 1)),
    ],
    ids=["count", "iterator", "generator", "closure", "partial", "context", "thread"],
)
def test_what_a_value_holds_without_attributes_is_seen(made, advance):
    """Of an iterator how far it is, of a function what it keeps."""
    value = made()
    before = texts("value", value)
    assert texts("value", value) == before
    advance(value)
    assert texts("value", value) != before


def test_what_cannot_be_read_or_has_no_data_is_left_out():
    class Raises(dict):
        def items(self):
            raise OSError

    model, loop = nn.Linear(1, 1), []
    loop.append(loop)
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (2,))
    assert texts("model", model, held={id(model)}) == {}
    assert not any(texts("each", each) for each in (sparse, sys, print, SimpleNamespace))
    assert texts("raises", Raises(a=1)) == {"len(raises)": SHOWN + "1"}
    assert texts("turned", np.arange(3)[::-1])["turned"].startswith(STATE)
    assert texts("loop", loop) == {"len(loop)": SHOWN + "1"}
    assert list(texts("many", list(range(MOST_ELEMENTS + 1)))) == ["len(many)"]


def test_variables_are_those_of_the_frames_of_the_recipe():
    def train():
        inner, outer = 1, "hidden by the inner one"
        return call(inner, outer)

    def call(inner, _outer):
        own = inner + 1
        assert own == 2
        return variables_of(sys._getframe())

    found = train()
    assert (found["own"], found["inner"], found["outer"]) == (2, 1, "hidden by the inner one")
    assert "ENTRIES" in found, "the script's own variables"
    assert not {"pytest", "Evidence"} & found.keys(), "modules and classes"
