"""A plan is read; wrong lines and faults out of reach are refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import UsageError
from elastic.faults import plan
from elastic.faults.plan import NODE, RESTORE, At, AtIntervals, Kind, parse, unreached

ROOT = Path(__file__).parents[2]


def at(point, number, who=0):
    return At(point=point, number=number, who=who)


def does(kind, amount=0.0, target=""):
    return kind, amount, target


MEANINGS = {
    "step 40 rank 1: kill": (at("forward", 40, 1), does(Kind.KILL)),
    "step 7 mid-sum : raise": (at("mid-sum", 7), does(Kind.RAISE)),
    "step 3 rank 2 optimizer: exit 5": (at("optimizer", 3, 2), does(Kind.EXIT, 5)),
    "step 9 snapshot: hang": (at("snapshot", 9), does(Kind.HANG)),
    "step 9 rank 1 after-snapshot: pause 0.5s": (at("after-snapshot", 9, 1), does(Kind.PAUSE, 0.5)),
    "step 80 rank 0: slow 3s": (at("forward", 80), does(Kind.SLOW, 3)),
    "step 81 rank 1: flip": (at("optimizer", 81, 1), does(Kind.FLIP, target="parameters")),
    "step 82 mid-sum: flip optimizer": (at("mid-sum", 82), does(Kind.FLIP, target="optimizer")),
    "step 83 rank 1: flip gradient": (at("forward", 83, 1), does(Kind.FLIP, target="gradient")),
    "step 60 node 2: pause 5s": (at(NODE, 60, 2), does(Kind.PAUSE, 5)),
    "step 61 node 0: terminate": (at(NODE, 61), does(Kind.TERMINATE)),
    "checkpoint 40 before-commit: kill uploader": (at("before-commit", 40), does(Kind.KILL)),
    "checkpoint 40 upload: pause 5s": (at("upload", 40), does(Kind.PAUSE, 5)),
    "generation 2 rank 1 restore: kill": (at(RESTORE, 2, 1), does(Kind.KILL)),
    "every 20±10s: kill random worker, seed 7": (
        AtIntervals(period_s=20, jitter_s=10, seed=7),
        does(Kind.KILL),
    ),
    "every 5s: kill random worker, seed 0": (AtIntervals(period_s=5, jitter_s=0, seed=0), does(Kind.KILL)),
}


def test_a_plan_of_every_kind_of_line():
    """Comments, blank lines, odd spaces, semicolons; the text of each fault is its line."""
    first, *others = MEANINGS
    found = parse(
        f"# a drill; of all\n\n{first.replace(' ', '   ')}; {'; '.join(others[:8])}  # some\n"
        + "\n".join(others[8:])
    )
    assert {each.text: (each.trigger, (each.kind, each.amount, each.target)) for each in found} == MEANINGS
    assert parse("# nothing\n ; ;") == ()


WRONG = {
    "step": [
        f"step {'9' * 5000}: kill",
        "step 0: kill",
        "step 40 upload: kill",
        "step 40",
        "step 40: exit 256",
        "step 40: pause 0s",
        "step 40: slow 0s",
        "step 40 mid-sum: flip gradient",
        "step 40 node 1: flip",
        "step 40 rank 1: terminate",
    ],
    "checkpoint": ["checkpoint 40 upload: kill"],
    "generation": ["generation 2 rank 1: kill", "generation 2 rank 1 restore: flip"],
    "every": ["every 5±10s: kill random worker, seed 7", "every 5s: kill random node, seed 1"],
    "step, checkpoint": ["kill rank 1"],
}


@pytest.mark.parametrize(("expected", "lines"), WRONG.items())
def test_a_wrong_line_is_refused_with_its_number(expected, lines):
    """Between valid faults, after a comment and a semicolon: the message counts lines."""
    for line in lines:
        with pytest.raises(UsageError) as caught:
            parse(f"# a drill\nstep 1: kill; step 2: kill\nstep 3: raise; {line}\nstep 2: kill")
        said, _, rest = str(caught.value).partition(", found ")
        assert said.startswith(f"fault plan, line 3: expected {expected}")
        assert rest.startswith(f"'{line}"[:99])


@given(st.text(max_size=40) | st.text("step 0123456789:rankodelwxvy±.,;#\n-", max_size=40))
def test_any_text_is_a_plan_or_a_usage_error(text):
    """Never another exception: the plan comes from a command line."""
    try:
        parse(text)
    except UsageError:
        return


@given(st.integers(0, 10**6))
def test_drawn_waits_and_victims_are_bounded_and_differ(seed):
    """A draw that ignored the kill's number, or the seed, would hit one victim for ever."""
    drawn = []
    for each in (seed, seed + 1):
        every = AtIntervals(period_s=20, jitter_s=10, seed=each)
        drawn.append([(every.wait_s(kill), every.pick(kill, 3)) for kill in range(60)])
    assert all(10 <= wait_s <= 30 for wait_s, _ in drawn[0])
    assert {victim for _, victim in drawn[0]} == {0, 1, 2}
    assert drawn[0] != drawn[1] and len(set(drawn[0])) == 60


def test_faults_that_struck_nothing_are_told():
    said = unreached(parse("\n".join(f"step {9 + n}: kill" for n in range(9))), 8)
    assert len(said) == 7 and said[0] == "no fault struck: step 9: kill (not reached in 8 steps)"
    assert said[-1] == "no fault struck of 3 more lines of the plan"


def test_the_document_has_valid_plans_and_explains_every_point():
    """A renamed point or action would leave users with a plan that is refused."""
    text = (ROOT / "docs/faults.md").read_text()
    plans = re.findall(r'(?:--faults|PLAN=)\s*"([^"$]+)"', text)
    assert len(plans) == 3 and all(len(parse(plan)) >= 2 for plan in plans)
    explained = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE))
    assert explained >= {*plan.STEP_POINTS, *plan.SAVE_POINTS}
