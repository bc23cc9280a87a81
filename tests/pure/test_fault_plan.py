"""A plan is read; wrong lines and faults out of reach are refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import UsageError
from elastic.faults.grammar import parse
from elastic.faults.plan import (
    SAVE_POINTS,
    STEP_POINTS,
    AtIntervals,
    AtNode,
    AtRendezvous,
    AtRestore,
    AtSave,
    AtStep,
    Exit,
    Flip,
    Hang,
    Kill,
    Pause,
    Raise,
    Slow,
    Terminate,
    check_fits,
)

ROOT = Path(__file__).parents[2]


def meanings(plan):
    return [(fault.trigger, fault.action) for fault in plan]


def test_a_plan_of_every_kind_of_line():
    """Comments, blank lines, odd spaces, semicolons; the text of each fault is its line."""
    plan = """
    # a drill
    step 40 rank 1: kill

    step   7 mid-sum:  raise   # with a comment
    step 3 rank 2 optimizer: exit 5; checkpoint 40 before-commit: kill uploader
    step 9 snapshot: hang; step 9 rank 1 after-snapshot: pause 0.5s
    step 80 rank 0: slow 3x; step 80 rank 1: slow 1.5x for 20 steps
    step 81 rank 1: flip; step 82: flip optimizer; step 83 rank 1: flip gradient
    step 60 node 2: pause 5s; step 61 node 0: terminate
    checkpoint 40 before-commit: pause 5s
    generation 2 rank 1 restore: kill; generation 2 node 1 rendezvous: kill
    every 20±10s: kill random worker, seed 7; every 5s: kill random worker, seed 0
    """
    found = parse(plan)
    assert meanings(found) == [
        (AtStep(step=40, rank=1, point="forward"), Kill()),
        (AtStep(step=7, rank=0, point="mid-sum"), Raise()),
        (AtStep(step=3, rank=2, point="optimizer"), Exit(5)),
        (AtSave(step=40, point="before-commit"), Kill()),
        (AtStep(step=9, rank=0, point="snapshot"), Hang()),
        (AtStep(step=9, rank=1, point="after-snapshot"), Pause(0.5)),
        (AtStep(step=80, rank=0, point="forward"), Slow(3.0)),
        (AtStep(step=80, rank=1, point="forward"), Slow(1.5, 20)),
        (AtStep(step=81, rank=1, point="optimizer"), Flip("parameters")),
        (AtStep(step=82, rank=0, point="optimizer"), Flip("optimizer")),
        (AtStep(step=83, rank=1, point="forward"), Flip("gradient")),
        (AtNode(step=60, node=2), Pause(5.0)),
        (AtNode(step=61, node=0), Terminate()),
        (AtSave(step=40, point="before-commit"), Pause(5.0)),
        (AtRestore(generation=2, rank=1), Kill()),
        (AtRendezvous(generation=2, node=1), Kill()),
        (AtIntervals(period_s=20, jitter_s=10, seed=7), Kill()),
        (AtIntervals(period_s=5, jitter_s=0, seed=0), Kill()),
    ]
    assert [fault.text for fault in found[:2]] == ["step 40 rank 1: kill", "step 7 mid-sum: raise"]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing", " ; ;"])
def test_a_plan_may_be_empty(text):
    """A file of comments is a plan without faults."""
    assert parse(text) == ()


@pytest.mark.parametrize(
    ("line", "expected", "found"),
    [
        ("kill rank 1", "a colon", "kill rank 1"),
        ("step 40", "a colon", "step 40"),
        ("node 3: kill", "step N, checkpoint N, generation N or every", "node 3"),
        ("Step 40: kill", "step N, checkpoint N, generation N or every", "Step 40"),
        (": kill", "step N, checkpoint N, generation N or every", "nothing"),
        ("step x: kill", "a number from 1 on", "x"),
        ("step ²: kill", "a number from 1 on", "²"),
        ("step -1: kill", "a number from 1 on", "-1"),
        ("step 0: kill", "a number from 1 on", "0"),
        (f"step {'9' * 5000}: kill", "a number from 1 on", "9" * 5000),
        ("step 40 rank: kill", "forward, backward", "rank"),
        ("step 40 rank -1: kill", "a rank", "-1"),
        ("step 40 node: kill", "forward, backward", "node"),
        ("step 40 node 1 forward: kill", "step N, then rank R", "40 node 1 forward"),
        ("step 40 sideways: kill", "forward, backward", "sideways"),
        ("step 40 upload: kill", "forward, backward", "upload"),
        ("step 40: exit", "kill, raise, exit C", "exit"),
        ("step 40: exit -9", "an exit code from 0 to 255", "-9"),
        ("step 40: exit 256", "an exit code from 0 to 255", "256"),
        ("step 40: kill kill", "kill, raise, exit C", "kill kill"),
        ("step 40: kill uploader", "kill, raise, exit C", "kill uploader"),
        ("step 40: terminate", "kill, raise, exit C", "terminate"),
        ("step 40:", "kill, raise, exit C", "nothing"),
        ("step 40: pause 0s", "a time above 0", "0s"),
        ("step 40: pause -5s", "a time above 0", "-5s"),
        ("step 40: pause 5", "a time above 0", "5"),
        ("step 40: pause 1e3s", "a time above 0", "1e3s"),
        ("step 40: slow 1x", "a factor above 1", "1x"),
        ("step 40: slow 3x for 0 steps", "a number from 1 on", "0"),
        ("step 40: flip everything", "parameters, optimizer or gradient", "everything"),
        ("step 40 mid-sum: flip", "no point, or optimizer", "mid-sum"),
        ("step 40 backward: flip gradient", "no point, or forward", "backward"),
        ("step 40 node 1: flip", "kill, pause Ns or terminate", "flip"),
        ("step 40 node 1: raise", "kill, pause Ns or terminate", "raise"),
        ("step 40 node 1: slow 3x", "kill, pause Ns or terminate", "slow 3x"),
        ("checkpoint 40: kill uploader", "checkpoint N, then upload", "40"),
        ("checkpoint 40 forward: kill uploader", "upload, before-commit or after-commit", "forward"),
        ("checkpoint 40 upload: raise", "kill uploader or pause Ns", "raise"),
        ("checkpoint 40 upload: kill", "kill uploader or pause Ns", "kill"),
        ("generation 2 rank 1: kill", "generation N, then rank R restore", "2 rank 1"),
        ("generation 2 rank 1 rendezvous: kill", "generation N, then rank R restore", "2 rank 1 rendezvous"),
        ("generation 0 rank 1 restore: kill", "a number from 1 on", "0"),
        ("generation 2 rank 1 restore: slow 2x", "kill, raise, exit C, hang or pause Ns", "slow 2x"),
        ("generation 2 node 1 rendezvous: hang", "kill, pause Ns or terminate", "hang"),
        ("every 20: kill random worker, seed 7", "every Ns or every N±Ms", "20"),
        ("every 0s: kill random worker, seed 7", "a time above 0 s", "0s"),
        ("every 5±10s: kill random worker, seed 7", "varies by no more than itself", "5±10s"),
        ("every -5s: kill random worker, seed 7", "every Ns or every N±Ms", "-5s"),
        ("every 20±10s: kill random rank, seed 7", "kill random worker", "kill random rank, seed 7"),
        ("every 20±10s: kill random worker", "seed N", "kill random worker"),
        ("every 20±10s: pause random worker, seed 7", "kill random", "pause random worker, seed 7"),
        ("every 5s: kill random node, seed 1", "kill random worker, seed N", "kill random node, seed 1"),
        ("step 2 rank 0 forward: kill", "each fault once", "step 2 rank 0 forward: kill"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number_and_what_was_expected(line, expected, found):
    """Between valid faults, after a comment and a semicolon: the message must count lines, not
    faults.
    """
    with pytest.raises(UsageError) as caught:
        parse(f"# a drill\nstep 1: kill; step 2: kill\nstep 3: raise; {line}\nstep 2: kill")
    message = str(caught.value)
    assert message.startswith("fault plan, line 3: expected ")
    said, _, rest = message.partition(", found ")
    assert expected in said
    assert rest.startswith(repr(found))
    assert repr(line) in rest


@given(st.text(max_size=40) | st.text("step 0123456789:rankodelwxvy±.,;#\n-", max_size=40))
def test_any_text_is_a_plan_or_a_usage_error(text):
    """Never another exception: the plan comes from a command line."""
    try:
        parse(text)
    except UsageError:
        return


def test_a_comment_ends_with_its_line():
    """A semicolon in a comment begins no fault."""
    assert len(parse("step 1: kill  # first this; then that")) == 1


@pytest.mark.parametrize(
    ("line", "nodes", "nproc"),
    [
        ("step 1 rank 3: kill", 2, 2),
        ("generation 1 rank 3 restore: kill", 2, 2),
        ("step 1 node 1: kill", 2, 2),
        ("generation 9 node 1 rendezvous: terminate", 2, None),
        ("step 1 rank 999: kill", 2, None),
        ("every 5s: kill random worker, seed 1", 1, 1),
        ("checkpoint 9 upload: pause 1s", 1, 1),
    ],
)
def test_a_fault_of_the_last_rank_and_node_fits(line, nodes, nproc):
    """Where the number of workers is not known yet, no rank is refused."""
    check_fits(parse(line), nodes=nodes, nproc=nproc)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("step 1 rank 4: kill", "expected a rank from 0 to 3 (2 nodes of 2), found 4"),
        ("generation 1 rank 4 restore: kill", "expected a rank from 0 to 3 (2 nodes of 2), found 4"),
        ("step 1 node 2: kill", "expected a node from 0 to 1 (--max-nodes 2), found 2"),
        ("generation 1 node 2 rendezvous: kill", "expected a node from 0 to 1 (--max-nodes 2), found 2"),
    ],
)
def test_a_fault_beyond_the_largest_world_is_refused(line, found):
    """By one, in the second line of the plan."""
    with pytest.raises(UsageError) as caught:
        check_fits(parse(f"step 1: kill\n{line}"), nodes=2, nproc=2)
    assert found in str(caught.value)
    assert repr(line) in str(caught.value)


def test_a_script_without_the_library_reaches_no_step_trigger():
    """Its processes can be killed at random, and its nodes at a rendezvous; it has no steps."""
    fits = parse("every 5s: kill random worker, seed 1; generation 2 node 0 rendezvous: kill")
    check_fits(fits, nodes=1, nproc=1, is_plain=True)
    for line in (
        "step 1: kill",
        "step 1 node 0: kill",
        "checkpoint 1 upload: pause 1s",
        "generation 1 rank 0 restore: kill",
    ):
        with pytest.raises(UsageError, match="does not import the library"):
            check_fits(parse(line), nodes=1, nproc=1, is_plain=True)


@given(st.integers(0, 10**6), st.integers(0, 1000), st.integers(1, 50))
def test_the_drawn_wait_and_victim_are_within_their_bounds(seed, kill, among):
    """The wait is within the jitter, the victim among the candidates."""
    every = AtIntervals(period_s=20, jitter_s=10, seed=seed)
    assert 10 <= every.wait_s(kill) <= 30
    assert 0 <= every.pick(kill, among) < among


def test_injections_differ_and_every_victim_is_drawn():
    """A draw that ignored the injection's number, or the seed, would hit the same victim for
    ever.
    """
    drawn_from = [AtIntervals(period_s=20, jitter_s=10, seed=seed) for seed in (7, 8)]
    drawn = [
        [(each.wait_s(injection), each.pick(injection, 3)) for injection in range(60)] for each in drawn_from
    ]
    assert len({wait_s for wait_s, _ in drawn[0]}) == 60
    assert {victim for _, victim in drawn[0]} == {0, 1, 2}
    assert drawn[0] != drawn[1]


def test_every_plan_in_the_document_is_valid():
    """A renamed point or action would leave users with a plan that is refused."""
    plans = re.findall(r'(?:--faults|PLAN=)\s*"([^"$]+)"', (ROOT / "docs/faults.md").read_text())
    assert len(plans) == 3
    assert all(len(parse(plan)) >= 2 for plan in plans)


def test_the_document_explains_every_point():
    """A point without an explanation is of no use."""
    rows = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs/faults.md").read_text(), re.MULTILINE)
    assert {*STEP_POINTS, *SAVE_POINTS, "restore", "rendezvous"} <= set(rows)
