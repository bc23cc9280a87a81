"""One moment by which a node has left, and each task's share of the time until then."""

import signal
import threading
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.shutdown_request import SHORTEST_S, GivenUp, ShutdownRequest
from elastic.errors import EXIT_FAILED, EXIT_INTERRUPTED
from elastic.system import interrupt
from elastic.system.leave_deadline import OVERTIME_S, LeaveDeadline, LeavePage, Share
from elastic.system.supervisor import last_word
from elastic.testing.fakes import FakeClock

GRACE_S, NOW_S = 32.0, 1000.0


def signals(*times: float) -> LeaveDeadline:
    return LeaveDeadline(grace_s=GRACE_S, signalled_s=times)


def test_second_signal_halves_the_rest_and_third_ends_it():
    """Before a request nothing is given up."""
    assert signals().ends_s == signals().killed_s == signals().until_s(Share.DRAIN) == inf
    assert signals(NOW_S).ends_s == NOW_S + GRACE_S
    assert signals(NOW_S, NOW_S + 12).ends_s == NOW_S + 12 + 10
    third = signals(NOW_S, NOW_S + 12, NOW_S + 14)
    assert third.ends_s == third.killed_s == third.until_s(Share.REPORT) == NOW_S + 14


def test_a_notice_begins_the_grace_and_shortens_none():
    noticed = LeaveDeadline(grace_s=GRACE_S, noticed_s=NOW_S, signalled_s=(NOW_S + 20,))
    assert noticed.ends_s == NOW_S + GRACE_S
    late = LeaveDeadline(grace_s=GRACE_S, noticed_s=NOW_S + 20, signalled_s=(NOW_S,))
    assert late.ends_s == NOW_S + GRACE_S


@given(st.lists(st.floats(0, 100), max_size=3), st.none() | st.floats(0, 100), st.floats(0, 60))
def test_shares_follow_each_other_and_end_with_the_grace(times, noticed_s, grace_s):
    known = LeaveDeadline(grace_s=grace_s, noticed_s=noticed_s, signalled_s=tuple(sorted(times)))
    shares = [known.until_s(share) for share in Share]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(known.ends_s, rel=1e-9)
    if known.asked_s is not None:
        assert known.asked_s <= shares[0] and known.ends_s <= known.asked_s + grace_s
        assert known.killed_s <= known.ends_s + OVERTIME_S
    fewer = LeaveDeadline(grace_s=grace_s, noticed_s=noticed_s, signalled_s=known.signalled_s[:1])
    assert known.ends_s <= fewer.ends_s  # a further signal never gives more time


def asked() -> tuple[LeavePage, ShutdownRequest, FakeClock]:
    page, clock = LeavePage(GRACE_S), FakeClock()
    return page, ShutdownRequest(page, clock), clock


def test_a_sigterm_that_comes_twice_at_once_is_one():
    """To a step of Slurm, by srun and by Slurm itself. Two of a person are further apart."""
    page, shutdown, _ = asked()
    for i in range(3):
        page.signalled(signal.SIGTERM, NOW_S + 0.01 * i)
    assert shutdown.reason == "SIGTERM asks this node to leave"
    assert page.deadline.signalled_s == (NOW_S,)
    page.signalled(signal.SIGTERM, NOW_S + 2)
    assert page.deadline.signalled_s == (NOW_S, NOW_S + 2)


def test_warnings_of_a_scheduler_shorten_nothing():
    page, shutdown, _ = asked()
    for i, number in enumerate((signal.SIGUSR1, signal.SIGUSR1, signal.SIGHUP)):
        page.warned(number, NOW_S + i)
    page.signalled(signal.SIGTERM, NOW_S + 5)
    shutdown.on_signal(signal.SIGINT, None)
    assert shutdown.reason == "SIGUSR1 asks this node to leave"  # the first
    assert page.deadline.ends_s == NOW_S + GRACE_S


def test_a_last_task_has_its_share_and_never_nothing():
    page, shutdown, clock = asked()
    began_s = clock.monotonic()
    assert shutdown.end_s(Share.SAVE, began_s, 60.0) == began_s + 60.0
    shutdown.request("a notice")
    assert shutdown.end_s(Share.DRAIN, began_s, 60.0) == began_s + GRACE_S / 2
    assert shutdown.end_s(Share.REPORT, began_s + 10, 5.0) == began_s + 15.0
    assert shutdown.end_s(Share.REPORT, began_s + 1000, 60.0) == began_s + 1000 + SHORTEST_S
    page.signalled(signal.SIGINT, began_s + 4)
    assert shutdown.reason == "a notice"


def test_a_call_that_hangs_is_given_up_with_its_share():
    _, shutdown, clock = asked()
    shutdown.request("a notice")
    let_go = threading.Event()

    def hangs() -> None:
        clock.sleep(GRACE_S)
        let_go.wait()

    with pytest.raises(GivenUp):
        shutdown.within(Share.SAVE, hangs)
    let_go.set()
    assert shutdown.within(Share.SAVE, lambda: 7) == 7
    with pytest.raises(KeyError):
        shutdown.within(Share.SAVE, lambda: {}["nothing"])


def test_the_last_word_of_a_supervisor_never_promises_too_much():
    page, shutdown, clock = asked()
    page.signalled(signal.SIGTERM, clock.monotonic())
    assert last_word(page, by_ctrl_c=True) == (interrupt.SENTENCE, interrupt.EXIT_CTRL_C)
    assert last_word(page, by_ctrl_c=False) == (interrupt.SENTENCE, EXIT_INTERRUPTED)
    shutdown.begins()
    assert last_word(page, by_ctrl_c=False)[1] == EXIT_FAILED  # workers may have trained on
    shutdown.saved(10)
    shutdown.ends(12)
    page.waits_for("the save of the last step")
    line, code = last_word(page, by_ctrl_c=False)
    assert code == EXIT_FAILED and "the save of the last step did not end in time (SIGTERM asks" in line
    shutdown.saved(12)
    shutdown.ends(12)
    assert last_word(page, by_ctrl_c=False)[1] == EXIT_INTERRUPTED
    shutdown.begins()  # the next generation may pass over what was saved
    shutdown.ends(12)
    assert last_word(page, by_ctrl_c=False)[1] == EXIT_FAILED
    shutdown.decided(0)
    assert last_word(page, by_ctrl_c=False)[1] == 0
