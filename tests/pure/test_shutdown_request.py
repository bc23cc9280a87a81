"""Attacks on the grace of a node that was asked to leave."""

import signal

from elastic.agent.shutdown_request import LAST_WORDS_S, Leaving
from elastic.testing.fakes import FakeClock

GRACE_S = 30.0


def asked(signals: int, *, age_s: float = 0.0) -> Leaving:
    clock = FakeClock()
    leaving = Leaving(GRACE_S, clock)
    for _ in range(signals):
        leaving.take_signal(signal.SIGTERM, None)
    clock.sleep(age_s)
    return leaving


def test_of_several_reasons_the_first_counts_and_so_does_its_moment():
    clock = FakeClock()
    leaving = Leaving(GRACE_S, clock)
    assert not leaving.is_asked
    leaving.ask("the cloud takes this machine")
    began_s = clock.monotonic()
    clock.sleep(4.0)
    leaving.take_signal(signal.SIGINT, None)

    assert leaving.reason == "the cloud takes this machine"
    assert leaving.age_s == 4.0
    assert leaving.deadline_s == began_s + GRACE_S


def test_the_second_signal_ends_the_wait_for_a_drain_and_the_third_that_for_a_checkpoint():
    assert [asked(count).is_impatient for count in range(4)] == [False, False, True, True]
    assert [asked(count).is_over for count in range(4)] == [False, False, False, True]


def test_what_is_left_to_do_has_what_is_left_of_the_grace_and_never_nothing():
    assert asked(0, age_s=1000.0).patience_s(60.0) == 60.0
    assert asked(1, age_s=10.0).patience_s(60.0) == GRACE_S - 10.0
    assert asked(1, age_s=10.0).patience_s(5.0) == 5.0
    assert asked(1, age_s=1000.0).patience_s(60.0) == LAST_WORDS_S
    assert asked(3).patience_s(60.0) == LAST_WORDS_S


def test_a_node_that_goes_unasked_has_all_of_its_grace_from_now_on():
    clock = FakeClock()
    leaving = Leaving(GRACE_S, clock)
    clock.sleep(1000.0)
    assert leaving.deadline_s == clock.monotonic() + GRACE_S
