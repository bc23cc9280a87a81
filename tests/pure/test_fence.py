"""An uploader asks its agent for the newest generation, over a page of memory that both map."""

import threading
from contextlib import closing

import pytest
from shown_generation import Rendezvous

from elastic.errors import StoreFailed
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock
from elastic.uploader import fence as module
from elastic.uploader.fence import Fence, FencePage


@pytest.fixture
def shown():
    return Rendezvous(3)


@pytest.fixture
def page(shown):
    with closing(FencePage(shown)) as page:
        yield page
        shown.may_answer.set()


def fence_of(page, clock=None, *, is_orphan=False):
    return Fence(page.fds, clock or SystemClock(), is_orphan=lambda: is_orphan)


@pytest.mark.parametrize(
    ("generation", "entered", "is_admitted", "is_newest"),
    [(3, 0, True, True), (2, 3, True, False), (2, 2, False, False), (2, 0, False, False), (4, 0, True, True)],
)
def test_the_newest_generation_admits_its_members(
    page, monkeypatch, generation, entered, is_admitted, is_newest
):
    monkeypatch.setattr(module, "ENTERING_S", 0.1)
    page.enter(entered)
    fence = fence_of(page)
    assert fence.admits(generation) is is_admitted
    assert fence.is_newest(generation) is is_newest


def asked_meanwhile(page, shown, question, meanwhile):
    """The answer of a fence whose agent does something as soon as it was asked."""
    answers, fence = [], fence_of(page)
    shown.asked.clear()
    asking = threading.Thread(target=lambda: answers.append(question(fence)))
    asking.start()
    assert shown.asked.wait(60)
    assert answers == []
    meanwhile()
    asking.join(60)
    return answers


def test_a_save_waits_for_its_node_to_enter_a_new_generation(page, shown, monkeypatch):
    """Generation 3 was formed, and the node enters it a moment later."""
    monkeypatch.setattr(module, "ENTERING_S", 60.0)
    assert asked_meanwhile(page, shown, lambda fence: fence.admits(2), lambda: page.enter(3)) == [True]


def test_a_number_from_before_the_question_does_not_count(page, shown):
    """The machine was suspended: the page shows generation 3, and the agent's next read shows 4."""
    page.enter(3)
    assert fence_of(page).admits(3)
    shown.may_answer.clear()

    def answer():
        shown.newest = 4
        shown.may_answer.set()

    both = asked_meanwhile(page, shown, lambda fence: (fence.admits(3), fence.is_newest(3)), answer)
    assert both == [(False, False)]


def test_a_silent_agent_stops_the_save_and_the_deletion(page, shown):
    """It is stopped: it neither answers nor fails."""
    shown.may_answer.clear()
    fence = fence_of(page, clock := FakeClock())
    with pytest.raises(StoreFailed, match="found it silent"):
        fence.admits(3)
    assert not fence.is_newest(3)
    assert clock.now <= 1000.0 + 2 * module.SILENT_S + 1.0


@pytest.mark.parametrize("is_orphan", [True, False], ids=["dead agent", "no rendezvous"])
def test_the_last_number_counts_for_saves_where_none_can_be_had(page, shown, monkeypatch, is_orphan):
    """The host of the rendezvous may be dead with its node: the state must be saved all the same.
    Nothing is deleted, because a newer generation may rely on it.
    """
    monkeypatch.setattr(module, "ENTERING_S", 0.1)
    monkeypatch.setattr(module, "SILENT_S", 0.3)
    assert fence_of(page).admits(3)
    shown.newest = ConnectionError("cut off")
    if is_orphan:
        page.close()
    fence = fence_of(page, is_orphan=is_orphan)
    assert (fence.admits(3), fence.admits(2), fence.is_newest(3)) == (True, False, False)


def test_the_number_only_grows(page, shown):
    """The rendezvous lost its data."""
    assert fence_of(page).is_newest(3)
    shown.newest = 0
    assert not fence_of(page).is_newest(2)


def test_without_an_agent_nothing_is_fenced():
    fence = Fence((), FakeClock(), is_orphan=lambda: True)
    assert fence.admits(1)
    assert fence.is_newest(1)
