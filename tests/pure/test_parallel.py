"""Every task is done once, on however many threads there are, and an error ends the others."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.snapshot.image_hash import run_all


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 5))
def test_every_piece_of_every_task_is_done_once(sizes, threads):
    """The twin: one task after the other."""
    done, lock = [], threading.Lock()

    def task(number, size):
        for piece in range(size):
            with lock:
                done.append((number, piece))
            yield

    run_all([task(number, size) for number, size in enumerate(sizes)], threads)
    assert sorted(done) == [(number, piece) for number, size in enumerate(sizes) for piece in range(size)]


def endless(begun):
    while True:
        begun.set()
        yield


@pytest.mark.parametrize("error", [OSError("no answer"), KeyboardInterrupt()])
def test_an_error_ends_tasks_that_other_threads_have_begun(error):
    """They never end by themselves; Ctrl-C comes as an error of the thread that called."""
    begun = threading.Event()

    def failing():
        assert begun.wait(60)
        yield
        raise error

    with pytest.raises(type(error)):
        run_all([endless(begun), failing(), endless(begun)], 2)
