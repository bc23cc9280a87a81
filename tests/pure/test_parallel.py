"""An error of one task ends the others; that each is done once, test_image.py shows."""

import threading

import pytest

from elastic.snapshot.image_hash import run_all


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
