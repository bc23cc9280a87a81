"""The worker that failed first is named, and a victim only when nobody else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.workers.first_failure import WorkerError, first_failure, read_errors, was_sigkilled
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_PEER_LOST


def told(rank, time):
    return WorkerError(rank=rank, message=f"rank {rank}", traceback=f"trace {rank}", time=time)


def test_the_earliest_culprit_speaks_even_when_a_victim_was_seen_first():
    codes = {2: EXIT_PEER_LOST, 1: EXIT_FAILED, 0: EXIT_FAILED}

    assert first_failure(codes, set(), [told(2, 1.0), told(1, 3.0), told(0, 2.0)], "reason").rank == 0


def test_a_worker_killed_from_outside_is_blamed_before_the_victim_that_wrote_a_traceback():
    """A SIGKILL leaves no word; its peer's broken collective does, and must not stand for the cause."""
    first = first_failure({1: EXIT_PEER_LOST, 0: -9}, set(), [told(1, 1.0)], "rank 0 ended with signal 9")

    assert (first.rank, first.message, first.traceback) == (0, "rank 0 ended with signal 9", "")


def test_workers_that_the_agent_killed_are_no_culprits():
    assert first_failure({0: -9, 1: EXIT_FAILED}, {0}, [told(1, 1.0)], "reason").rank == 1


def test_victims_speak_when_nobody_else_can():
    assert first_failure({0: EXIT_PEER_LOST}, set(), [told(0, 1.0)], "reason").message == "rank 0"


def test_a_culprit_that_is_still_ending_is_named_before_the_victim_that_ended_first():
    """Its sockets are closed and its exit code is not there yet; the victim, a script without the library, looks like a culprit."""
    words = [told(0, 2.0), told(1, 1.0)]
    assert first_failure({0: EXIT_FAILED}, set(), words, "reason").rank == 1
    assert first_failure({0: EXIT_PEER_LOST}, set(), words, "reason").rank == 1
    assert first_failure({0: -9}, set(), [told(1, 1.0)], "reason").message == "reason"


@given(
    st.dictionaries(
        st.integers(0, 5), st.sampled_from([EXIT_COMPLETE, EXIT_FAILED, EXIT_PEER_LOST, -9]), min_size=1
    ),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 5)),
)
def test_somebody_is_always_named(codes, killed, spoke):
    words = [told(rank, float(rank)) for rank in spoke if rank in codes]

    assert first_failure(codes, killed, words, "reason").rank in codes


def test_a_torn_error_file_tells_nothing(tmp_path):
    (tmp_path / "rank0.json").write_text('{"rank": 0, "mess')

    assert read_errors(tmp_path, [0, 1]) == []


@pytest.mark.parametrize(
    ("codes", "is_so"),
    [({0: -9}, True), ({0: -11}, False), ({0: 1, 1: -9}, False), ({1: -9}, False)],
    ids=str,
)
def test_only_sigkill_comes_from_outside(codes, is_so):
    """Rank 0 was killed, crashed, raised beside one that was killed, or has not ended."""
    assert was_sigkilled(codes, 0) is is_so
