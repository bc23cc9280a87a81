"""A word that one process writes to the page is read by others, and no other word changes."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.system.control_page import MAX_WORKERS, ControlPage
from elastic.system.silence import Heartbeat, Phase


@given(st.dictionaries(st.integers(0, MAX_WORKERS - 1), st.integers(0, 2**63 - 1)), st.booleans())
def test_writing_one_word_changes_no_other(steps, drain):
    """The first and the last worker, with the largest steps, and the request beside them, which is
    made and withdrawn or the other way round. Read through a second mapping.
    """
    page = ControlPage.create()
    page.drain = not drain
    page.drain = drain
    for rank, step in steps.items():
        page.set_step(rank, step)
    other = ControlPage.open(page.path)
    assert other.drain == drain
    assert all(other.step(rank) == steps.get(rank, 0) for rank in {0, 1, MAX_WORKERS - 1, *steps})


def test_a_worker_shows_the_step_of_its_loop_and_no_other():
    """Step 0 is the time before its first step, in which a state is restored."""
    page = ControlPage.create()
    assert page.open_step(1) is None
    for step in 0, 7, None:
        page.set_open_step(1, step)
        page.set_step(1, 3)
        assert page.open_step(1) == step
    assert (page.open_step(0), page.open_step(2), page.step(1)) == (None, None, 3)


@given(st.sampled_from(Phase), st.integers(1, 9), st.none() | st.integers(0, 99))
def test_heartbeats_and_the_descriptor_are_read_back(phase, beats, fd):
    """Descriptor 0 is not the same as none."""
    page = ControlPage.create()
    page.slots_fd = fd
    for _ in range(beats):
        page.beat(1, phase)
    assert page.slots_fd == fd
    assert page.heartbeat(1) == Heartbeat(step=0, phase=phase, beats=beats)
    assert page.heartbeat(0) == page.heartbeat(2) == Heartbeat(step=0, phase=Phase.START, beats=0)


@given(
    st.lists(
        st.tuples(st.integers(1, 2**40), st.integers(0, 2**63 - 1)), max_size=5, unique_by=lambda v: v[0]
    )
)
def test_the_last_two_votes_of_each_worker_are_read(votes):
    """Steps grow. The last worker votes too; read through a second mapping."""
    page, votes = ControlPage.create(), sorted(votes)
    page.set_step(0, 7)
    for step, checksum in votes:
        page.vote(0, step, checksum)
    page.vote(MAX_WORKERS - 1, 5, 6)
    page.is_settled = True
    other = ControlPage.open(page.path)
    assert other.votes(0) == dict(votes[-2:])
    assert other.votes(MAX_WORKERS - 1) == {5: 6}
    assert (other.step(0), other.votes(1), other.is_settled) == (7, {}, True)
    page.clear()
    assert (other.votes(0), other.is_settled) == ({}, False)
