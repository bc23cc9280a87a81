"""The worker that failed first is blamed, and a victim only if no culprit is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.workers import first_failure, was_sigkilled
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_PEER_LOST
from elastic.system.worker_error import WorkerError


def error(rank, time):
    return WorkerError(rank=rank, message=f"rank {rank}", traceback=f"trace {rank}", time=time)


def test_the_earliest_culprit_is_blamed_even_if_a_victim_was_seen_first():
    codes = {2: EXIT_PEER_LOST, 1: EXIT_FAILED, 0: EXIT_FAILED}

    assert first_failure(codes, set(), [error(2, 1.0), error(1, 3.0), error(0, 2.0)], "reason").rank == 0


def test_a_worker_killed_from_outside_is_blamed_before_a_victim_with_a_traceback():
    """SIGKILL leaves no error file.

    The peer's broken collective does, and must not pass for the cause.
    """
    first = first_failure({1: EXIT_PEER_LOST, 0: -9}, set(), [error(1, 1.0)], "rank 0 ended with signal 9")

    assert (first.rank, first.message, first.traceback) == (0, "rank 0 ended with signal 9", "")


def test_a_worker_that_the_agent_killed_is_no_culprit():
    assert first_failure({0: -9, 1: EXIT_FAILED}, {0}, [error(1, 1.0)], "reason").rank == 1


def test_a_victim_is_blamed_if_no_culprit_is_known():
    assert first_failure({0: EXIT_PEER_LOST}, set(), [error(0, 1.0)], "reason").message == "rank 0"


def test_a_culprit_that_has_not_exited_yet_is_blamed_before_a_victim_that_has():
    """Its sockets are closed and its exit code is not there yet.

    The victim is a script without the library, which exits like a culprit.
    """
    errors = [error(0, 2.0), error(1, 1.0)]
    assert first_failure({0: EXIT_FAILED}, set(), errors, "reason").rank == 1
    assert first_failure({0: EXIT_PEER_LOST}, set(), errors, "reason").rank == 1
    assert first_failure({0: -9}, set(), [error(1, 1.0)], "reason").message == "reason"


def test_a_worker_that_ended_with_0_within_its_loop_is_blamed_before_a_victim():
    """It leaves no error file; its peer does, with a traceback of the sum that broke."""
    codes, files = {0: EXIT_PEER_LOST, 1: EXIT_COMPLETE}, [error(0, 1.0)]
    assert first_failure(codes, set(), files, "rank 1 ended", {1}).message == "rank 1 ended"
    assert first_failure(codes, set(), files, "reason").rank == 0


@given(
    st.dictionaries(
        st.integers(0, 5), st.sampled_from([EXIT_COMPLETE, EXIT_FAILED, EXIT_PEER_LOST, -9]), min_size=1
    ),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
)
def test_a_worker_of_this_node_is_always_blamed(codes, killed, with_file):
    errors = [error(rank, float(rank)) for rank in with_file if rank in codes]

    assert first_failure(codes, killed, errors, "reason").rank in codes


@pytest.mark.parametrize(
    ("codes", "is_so"),
    [({0: -9}, True), ({0: -11}, False), ({0: 1, 1: -9}, False), ({1: -9}, False)],
    ids=str,
)
def test_only_sigkill_comes_from_outside(codes, is_so):
    """Rank 0 was killed, crashed, raised beside a killed rank, or has not exited."""
    assert was_sigkilled(codes, 0) is is_so
