"""A word that one process writes to the page is read by others, and no other word changes."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.system.control_page import MAX_WORKERS, ControlPage
from elastic.system.silence import Heartbeat, Phase

FRESH = (0, None, Phase.START, 0)
numbers = st.integers(0, 2**62)
shown = st.tuples(numbers, st.none() | numbers, st.sampled_from(Phase), st.integers(1, 9))


@given(st.dictionaries(st.integers(0, MAX_WORKERS - 1), shown), st.booleans(), st.none() | st.integers(0, 99))
def test_writing_one_word_changes_no_other(workers, drain, fd):
    """Of the first and the last worker, too, and the words of the node beside them; each has had
    another value before. Step 0 and descriptor 0 are not none. Read through a second mapping.
    """
    page = ControlPage.create()
    page.drain, page.slots_fd = not drain, 7
    page.drain, page.slots_fd = drain, fd
    for rank, (step, open_step, phase, beats) in workers.items():
        page.set_open_step(rank, 7)
        page.set_open_step(rank, open_step)
        page.set_step(rank, step)
        for _ in range(beats):
            page.beat(rank, phase)
    other = ControlPage.open(page.path)
    assert (other.drain, page.slots_fd) == (drain, fd)
    for rank in {0, 1, MAX_WORKERS - 1, *workers}:
        step, open_step, phase, beats = workers.get(rank, FRESH)
        assert (other.step(rank), other.open_step(rank)) == (step, open_step)
        assert other.heartbeat(rank) == Heartbeat(step=step, phase=phase, beats=beats)


@given(st.dictionaries(st.integers(1, 2**40), st.integers(0, 2**63 - 1), max_size=5))
def test_the_last_two_votes_of_each_worker_are_read(votes):
    """Steps grow. The last worker votes too; read through a second mapping."""
    page, votes = ControlPage.create(), sorted(votes.items())
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
