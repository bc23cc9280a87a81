"""What one process writes on the page another one reads, each word on its own."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from elastic.system.control_page import MAX_WORKERS, ControlPage

WORKER = """
import sys
from elastic.system.control_page import ControlPage
page = ControlPage.open(sys.argv[1])
page.set_step(1, 2**40 + page.drain)
"""


def test_a_fresh_page_asks_for_nothing():
    """A worker that read a drain here would stop after its first step."""
    page = ControlPage.create()
    assert not page.drain
    assert {page.step(rank) for rank in range(MAX_WORKERS)} == {0}


def test_another_process_reads_the_request_and_its_step_is_read_here():
    """A real process opens the page by its path, sees the drain and writes its step."""
    page = ControlPage.create()
    page.drain = True
    subprocess.run([sys.executable, "-c", WORKER, page.path], check=True, timeout=60)
    assert page.step(1) == 2**40 + 1


@given(st.dictionaries(st.integers(0, MAX_WORKERS - 1), st.integers(0, 2**63 - 1)), st.booleans())
def test_words_do_not_touch_each_other(steps, drain):
    """The first and the last worker, and the request beside them, with the largest numbers."""
    page = ControlPage.create()
    page.drain = drain
    for rank, step in steps.items():
        page.set_step(rank, step)
    assert page.drain == drain
    assert all(page.step(rank) == steps.get(rank, 0) for rank in {0, 1, MAX_WORKERS - 1, *steps})


def test_a_cleared_page_has_nothing_of_the_old_generation():
    """Seen from a second opening, as a new worker sees it."""
    page = ControlPage.create()
    page.drain = True
    page.set_step(3, 7)
    page.clear()
    other = ControlPage.open(page.path)
    assert not other.drain
    assert other.step(3) == 0


def test_a_withdrawn_request_is_gone():
    """The request is a state, not a message."""
    page = ControlPage.create()
    page.drain = True
    page.drain = False
    assert not ControlPage.open(page.path).drain
