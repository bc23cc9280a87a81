"""One moment by which a node has left, and each task's share of the time until then."""

import signal
import threading
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.shutdown_request import SHORTEST_S, GivenUp, ShutdownRequest
from elastic.errors import EXIT_FAILED, EXIT_INTERRUPTED
from elastic.system import command_end
from elastic.system.leave_deadline import OVERTIME_S, LeaveDeadline, LeavePage, Share
from elastic.system.supervisor import last_word
from elastic.testing.fakes import FakeClock

GRACE_S, NOW_S = 32.0, 1000.0


@given(st.floats(0, 100), st.none() | st.floats(0, 200), st.floats(0, 60))
def test_shares_follow_each_other_and_end_with_the_grace(asked_s, forced_s, grace_s):
    known = LeaveDeadline(grace_s=grace_s, asked_s=asked_s, forced_s=inf if forced_s is None else forced_s)
    shares = [known.until_s(share) for share in Share]
    assert shares == sorted(shares) and shares[-1] <= known.killed_s <= asked_s + grace_s + OVERTIME_S
    if forced_s is None:
        assert (known.until_s(Share.DRAIN), shares[-1]) == (asked_s + grace_s / 2, asked_s + grace_s)
    else:
        assert known.killed_s <= forced_s


def asked():
    page, clock = LeavePage(GRACE_S), FakeClock()
    return page, ShutdownRequest(page, clock), clock


@pytest.mark.parametrize(
    ("signals", "forced_s"),
    [
        ([signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT], None),
        ([signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT], 2.0),
    ],
)
def test_a_second_ctrl_c_ends_the_grace_and_nothing_else_does(signals, forced_s):
    """Each a second after the one before, and twice at once, as programs pass them on."""
    page, shutdown, _ = asked()
    assert page.deadline.killed_s == inf and shutdown.reason is None
    for i, number in enumerate(signals):
        page.signalled(number, NOW_S + i)
        page.signalled(number, NOW_S + i + 0.1)
    shutdown.on_signal(signal.SIGTERM, None)
    assert shutdown.reason == f"{signals[0].name} asks this node to leave"
    ends_s = NOW_S + (GRACE_S + OVERTIME_S if forced_s is None else forced_s)
    assert (page.deadline.asked_s, page.deadline.killed_s) == (NOW_S, ends_s)


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

    def hangs():
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
    assert last_word(page) == (command_end.SENTENCE, EXIT_INTERRUPTED)
    pressed, *_ = asked()
    pressed.signalled(signal.SIGINT, clock.monotonic())
    assert last_word(pressed) == (command_end.SENTENCE, command_end.EXIT_CTRL_C)
    shutdown.begins()
    assert last_word(page)[1] == EXIT_FAILED  # workers may have trained on
    shutdown.saved(10)
    shutdown.ends(12)
    line, code = last_word(page)
    assert code == EXIT_FAILED and "this node did not leave in time (SIGTERM asks" in line
    shutdown.saved(12)
    shutdown.ends(12)
    assert last_word(page)[1] == EXIT_INTERRUPTED
    shutdown.begins()  # the next generation may pass over what was saved
    shutdown.ends(12)
    assert last_word(page)[1] == EXIT_FAILED
    shutdown.decided(0)
    assert last_word(page)[1] == 0
