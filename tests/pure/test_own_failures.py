"""An error that came back ends the run, and nothing else of an error does."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.exit_report import told_at_the_end
from elastic.agent.own_failures import OwnFailures, came_back, first_failure, was_sigkilled
from elastic.divergence import Divergence
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_PEER_LOST
from elastic.rendezvous.group import WorkerFailure
from elastic.system.worker_error import RESTORES_OF_ONE_STATE, ErrorPlace, RaisedError, WorkerError

PLACES = st.builds(
    ErrorPlace,
    where=st.sampled_from(["before step 1", "in step 9", "in step 10"]),
    resumed=st.none() | st.integers(0, 9),
    has_older=st.booleans(),
)
ERRORS = st.builds(
    RaisedError,
    kind=st.sampled_from(["NameError", "ValueError"]),
    message=st.sampled_from(["a", "b"]),
    line=st.sampled_from(["r.py:3", "r.py:4"]),
    place=PLACES,
)
MANY = RESTORES_OF_ONE_STATE + 1


def raised(where="in step 9", resumed=8, *, has_older=True, kind="ValueError"):
    place = ErrorPlace(where=where, resumed=resumed, has_older=has_older)
    return RaisedError(kind=kind, message="m", line="r.py:3", place=place)


@given(now=ERRORS, before=st.lists(ERRORS, max_size=3), restarts=st.integers(2, 9))
def test_only_the_same_error_at_the_same_place_is_final(now, before, restarts):
    """Class, message, line and step must all be those of one error of the generation before, as
    long as restarts are left.
    """

    def identity(error):
        return error.kind, error.message, error.line, error.place.where

    if came_back(now, [before], restarts) is not None:
        assert identity(now) in [identity(each) for each in before]
    assert came_back(None, [before], restarts) is None
    assert came_back(now, [], restarts) is None
    assert came_back(now, [[]], restarts) is None


@given(error=ERRORS, began=st.none() | st.integers(0, 9), restarts=st.integers(0, RESTORES_OF_ONE_STATE))
def test_it_is_always_final_where_no_older_state_would_be_tried(error, began, restarts):
    """--max-restarts ends the run before a state gives way to an older one."""
    before = replace(error, place=replace(error.place, resumed=began))
    assert came_back(error, [[before]], restarts)


@given(began=st.integers(1, 9), began_before=st.integers(0, 9), has_older=st.booleans())
def test_a_state_that_may_be_damaged_gets_the_chance_to_give_way(began, began_before, has_older):
    """With restarts enough, the run goes on until the error has come back from an older state."""
    now, before = raised(resumed=began, has_older=has_older), raised(resumed=began_before)
    is_final = came_back(now, [[before]], MANY) is not None
    assert is_final == (not has_older or began < began_before)


def test_a_mistake_in_the_text_is_not_blamed_on_a_state():
    error = raised(kind="NameError")
    assert came_back(error, [[error]], MANY)


def in_a_row(steps, trained=None, **changes):
    """The same error in these steps, each after one step of its process, or after so many."""
    found = []
    for number, step in enumerate(steps):
        error = raised(f"in step {step}", **changes)
        done = 1 if trained is None else trained[number]
        found.append(replace(error, place=replace(error.place, trained=done)))
    return found


def test_an_error_of_each_process_ends_the_run_when_the_restarts_are_used_up():
    """Each generation trains one step and fails in its second, so that none counts as a restart."""
    *earlier, now = in_a_row([2, 3, 4, 5])
    assert came_back(now, [[each] for each in earlier], 4) is None
    said = came_back(now, [[each] for each in earlier], 3)
    assert said == "the same error ended 4 generations in a row, each after one step, and --max-restarts is 3"


def test_errors_that_come_now_and_then_go_on():
    """The same text after other numbers of steps, as of a bad file that is read once in a while;
    and the same again behind a generation that ended otherwise.
    """
    *earlier, now = in_a_row([9, 30, 31, 80], trained=[8, 21, 1, 49])
    assert came_back(now, [[each] for each in earlier], 1) is None
    first, *_, now = in_a_row([2, 3, 4])
    assert came_back(now, [[first], []], 1) is None


def test_a_complete_run_tells_of_an_error_that_came_more_often_than_restarts_are_allowed():
    """On two nodes, which both record the failure of a generation."""
    failures = [(generation, f"{kind}: no\nmore") for kind in ("A", "B") for generation in (1, 3, 4)]
    said = told_at_the_end([*failures, (5, "B: no\nmore"), (5, "B: no\nmore")], 3)
    assert said == "; 4 generations failed with the same error on the way: B: no"
    assert told_at_the_end(failures, 3) == told_at_the_end([], 0) == ""


def test_only_failures_that_the_state_may_have_caused_count_against_it():
    """SIGKILL comes from outside. A new step clears what the group counted before it."""
    own = OwnFailures(3)
    for from_outside in (False, True, False):
        failure = WorkerFailure(node="n", rank=0, message="m", traceback="", from_outside=from_outside)
        own.count(failure)
    own.count(None)
    assert own.suspect == 2
    own.generation_begins(restarts=3)
    assert own.suspect == 2
    own.generation_begins(restarts=0)
    assert own.suspect == 0


def test_a_machine_that_was_wrong_twice_is_faulty():
    """A difference that lay elsewhere, and one that nobody knows of, do not count."""
    own = OwnFailures(3)

    def differ(step, *, was_here):
        own.generation_ended([], Divergence(generation=1, step=step, agreed=0, entry=""))
        return own.agree(was_here=was_here)

    assert differ(2, was_here=False) == own.agree(was_here=True) == ""
    assert "computed something else at step 5" in differ(5, was_here=True)
    assert own.divergence is None and not own.is_faulty
    assert "was wrong at steps 5 and 9" in differ(9, was_here=True)
    assert own.is_faulty


@pytest.mark.parametrize(
    ("codes", "killed", "files", "blamed"),
    [
        # The earliest culprit, even if a victim was seen first.
        ({2: EXIT_PEER_LOST, 1: EXIT_FAILED, 0: EXIT_FAILED}, set(), {2: 1.0, 1: 3.0, 0: 2.0}, 0),
        # SIGKILL leaves no file; the broken collective of its peer does, and is not the cause.
        ({1: EXIT_PEER_LOST, 0: -9}, set(), {1: 1.0}, None),
        # The agent killed rank 0.
        ({0: -9, 1: EXIT_FAILED}, {0}, {1: 1.0}, 1),
        # No culprit is known.
        ({0: EXIT_PEER_LOST}, set(), {0: 1.0}, 0),
        # The culprit's sockets are closed, and its exit code is not there yet.
        ({0: EXIT_FAILED}, set(), {0: 2.0, 1: 1.0}, 1),
        ({0: EXIT_PEER_LOST}, set(), {0: 2.0, 1: 1.0}, 1),
        ({0: -9}, set(), {1: 1.0}, None),
        # Rank 3 ended with 0 within its loop.
        ({0: EXIT_PEER_LOST, 3: EXIT_COMPLETE}, set(), {0: 1.0}, None),
    ],
)
def test_the_worker_that_failed_first_is_blamed(codes, killed, files, blamed):
    """None: a worker without an error file, for which the exit code speaks."""
    errors = [WorkerError(rank=n, message=f"{n}", traceback="", time=time) for n, time in files.items()]
    first = first_failure(codes, killed, errors, "its exit code", {3} & codes.keys())
    assert first.message == ("its exit code" if blamed is None else f"{blamed}")


@given(
    st.dictionaries(
        st.integers(0, 5), st.sampled_from([EXIT_COMPLETE, EXIT_FAILED, EXIT_PEER_LOST, -9]), min_size=1
    ),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
)
def test_a_worker_of_this_node_is_always_blamed(codes, killed, files):
    errors = [WorkerError(rank=n, message="", traceback="", time=float(n)) for n in files if n in codes]
    first = first_failure(codes, killed, errors, "reason")
    assert first.rank in codes
    assert was_sigkilled(codes, first.rank) is (codes[first.rank] == -9)
