"""The grace period of a node that was asked to leave."""

import signal

from elastic.agent.shutdown_request import SHORTEST_LIMIT_S, ShutdownRequest
from elastic.testing.fakes import FakeClock

GRACE_S = 30.0


def asked(signals: int, *, age_s: float = 0.0) -> ShutdownRequest:
    clock = FakeClock()
    shutdown = ShutdownRequest(GRACE_S, clock)
    for _ in range(signals):
        shutdown.on_signal(signal.SIGINT, None)
    clock.sleep(age_s)
    return shutdown


def test_of_several_requests_the_first_gives_the_reason_and_the_time():
    clock = FakeClock()
    shutdown = ShutdownRequest(GRACE_S, clock)
    assert shutdown.reason is None
    shutdown.request("the cloud takes this machine")
    began_s = clock.monotonic()
    clock.sleep(4.0)
    shutdown.on_signal(signal.SIGINT, None)

    assert shutdown.reason == "the cloud takes this machine"
    assert shutdown.age_s == 4.0
    assert shutdown.deadline_s == began_s + GRACE_S


def test_the_second_signal_skips_the_drain_and_the_third_the_checkpoint():
    assert [asked(count).skips_drain for count in range(4)] == [False, False, True, True]
    assert [asked(count).skips_checkpoint for count in range(4)] == [False, False, False, True]


def test_a_sigterm_that_comes_twice_at_once_is_one():
    """To a step of Slurm, by srun and by Slurm itself. Two of a person are further apart."""
    clock = FakeClock()
    shutdown = ShutdownRequest(GRACE_S, clock)
    for _ in range(3):
        shutdown.on_signal(signal.SIGTERM, None)
        clock.sleep(0.01)
    assert (shutdown.reason, shutdown.skips_drain) == ("SIGTERM asks this node to leave", False)
    clock.sleep(1.0)
    shutdown.on_signal(signal.SIGTERM, None)
    assert (shutdown.skips_drain, shutdown.skips_checkpoint) == (True, False)


def test_warnings_request_a_drain_and_shorten_none():
    """Slurm's --signal, more than once, and then the SIGTERM of the time limit; the grace counts
    from the first.
    """
    clock = FakeClock()
    shutdown = ShutdownRequest(GRACE_S, clock)
    began_s = clock.monotonic()
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGHUP):
        shutdown.on_warning(number, None)
        clock.sleep(2.0)
    assert shutdown.reason == "SIGUSR1 asks this node to leave"
    shutdown.on_signal(signal.SIGTERM, None)
    assert (shutdown.skips_drain, shutdown.deadline_s) == (False, began_s + GRACE_S)
    clock.sleep(1.0)
    shutdown.on_signal(signal.SIGTERM, None)
    assert (shutdown.skips_drain, shutdown.skips_checkpoint) == (True, False)


def test_a_last_task_has_what_is_left_of_the_grace_and_never_nothing():
    began_s = FakeClock().monotonic()
    assert asked(0, age_s=1000.0).end_s(began_s, 60.0) == began_s + 60.0
    assert asked(1).end_s(began_s + 10.0, 60.0) == began_s + GRACE_S
    assert asked(1).end_s(began_s + 10.0, 5.0) == began_s + 15.0
    assert asked(1).end_s(began_s + 1000.0, 60.0) == began_s + 1000.0 + SHORTEST_LIMIT_S
    assert asked(3).end_s(began_s + 10.0, 60.0) == began_s + 10.0 + SHORTEST_LIMIT_S


def test_a_request_during_a_last_task_gives_it_the_grace_from_then_on():
    clock = FakeClock()
    shutdown = ShutdownRequest(GRACE_S, clock)
    began_s = clock.monotonic()
    clock.sleep(100.0)
    shutdown.request("the cloud takes this machine")
    assert shutdown.end_s(began_s, 1000.0) == began_s + 100.0 + GRACE_S


def test_without_a_request_the_grace_begins_now():
    clock = FakeClock()
    shutdown = ShutdownRequest(GRACE_S, clock)
    clock.sleep(1000.0)
    assert shutdown.deadline_s == clock.monotonic() + GRACE_S
