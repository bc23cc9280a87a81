"""Which thread asks for the steps, and which one runs their bodies."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic.errors import UsageError
from elastic.train.loop import step_thread
from elastic.train.loop.step_thread import StepThread
from elastic.worker import script_end

ASIDE = "step 1 was taken by a thread of its own .*without having computed a gradient: .* without a generator in the background"


def elsewhere(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def in_one_thread():
    thread = StepThread()
    thread.computes(1)
    thread.ends(1)


def test_a_loop_on_a_thread_of_its_own_and_a_body_that_the_main_thread_waits_for_are_let_through():
    in_one_thread()
    elsewhere(in_one_thread)
    thread = StepThread()
    elsewhere(thread.computes, 1)
    thread.ends(1)


def test_a_generator_in_the_background_is_refused_in_both_threads():
    """Whichever comes first: it asks for the next step, or the main thread computes the first."""
    thread = elsewhere(StepThread)
    with pytest.raises(UsageError, match=ASIDE):
        thread.computes(1)
    thread = elsewhere(StepThread)
    with pytest.raises(UsageError, match=ASIDE):
        thread.ends(1)


def test_a_step_by_the_main_thread_without_a_gradient_is_left_to_the_loop():
    """Which says what is missing."""
    StepThread().ends(1)


def test_an_error_of_this_library_that_ends_a_thread_ends_the_process(monkeypatch):
    """The main thread may wait for what that thread would have put into a queue."""
    ended, printed = [], []
    monkeypatch.setattr(threading, "excepthook", lambda found: printed.append(found.exc_value))
    monkeypatch.setattr(script_end, "_ends_process", [ended.append])
    step_thread.end_process_with_thread()

    def fail(error):
        raise error

    ours, theirs = UsageError("expected one loop"), ValueError("of the recipe")
    for error in (ours, theirs):
        thread = threading.Thread(target=fail, args=(error,))
        thread.start()
        thread.join()
    assert ended == [ours]
    assert theirs in printed
