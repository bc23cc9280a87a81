"""The lease of a run directory, on a folder and a clock that the test moves."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.errors import UsageError
from elastic.rendezvous.lease import Lease, LeaseRenewal, RunLease
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock

KEEP_ALIVE_S = 2.0


class Watched(FakeClock):
    """Calls `meanwhile` at each sleep."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.meanwhile()


def take(folder: Path, place: str, clock: FakeClock, here: str = "") -> Lease:
    return RunLease(str(folder), clock).take(
        place, keep_alive_s=KEEP_ALIVE_S, is_here=lambda token: token == here, notify=lambda _line: None
    )


def test_the_first_place_gets_the_lease_and_its_other_nodes_share_it(tmp_path: Path) -> None:
    """They find its token in the group, and do not wait."""
    clock = FakeClock()
    first = take(tmp_path, "a", clock)
    assert take(tmp_path, "also a", clock, here=first.token) == first
    assert clock.now == FakeClock().now


def test_another_place_is_refused_while_the_holder_renews(tmp_path: Path) -> None:
    first = take(tmp_path, "a", FakeClock())
    holder = RunLease(str(tmp_path), FakeClock())
    with pytest.raises(UsageError, match="is in use: a trains in it, and this is b"):
        take(tmp_path, "b", Watched(lambda: holder.renew(first)))
    assert take(tmp_path, "a", FakeClock(), here=first.token) == first


def test_a_silent_holder_loses_the_lease_after_two_keep_alives(tmp_path: Path) -> None:
    """It finds that out at its next renewal."""
    first, clock = take(tmp_path, "a", FakeClock()), FakeClock()
    RunLease(str(tmp_path), FakeClock()).renew(first)
    began_s = clock.now
    second = take(tmp_path, "b", clock)
    assert second.number == 2 and second.token != first.token
    assert first.patience_s <= clock.now - began_s <= first.patience_s + 2 * first.renew_s
    holder = RunLease(str(tmp_path), clock)
    assert holder.is_lost(first) and not holder.is_lost(second)


def test_a_holder_that_is_still_starting_is_not_taken_for_dead(tmp_path: Path) -> None:
    """It renews the lease for the first time once it is in the group, which then has its token."""
    first, clock = take(tmp_path, "a", FakeClock()), FakeClock()
    began_s = clock.now
    second = RunLease(str(tmp_path), clock).take(
        "a",
        keep_alive_s=KEEP_ALIVE_S,
        is_here=lambda token: token == first.token and clock.now - began_s > 4 * first.patience_s,
        notify=lambda _line: None,
    )
    assert second == first


def test_a_lease_of_a_directory_that_was_set_aside_is_lost(tmp_path: Path) -> None:
    """A new run has the name, and a lease with the same number."""
    holder = RunLease(str(tmp_path / "run"), FakeClock())
    first = take(tmp_path / "run", "a", FakeClock())
    assert not holder.is_lost(first)
    (tmp_path / "run").rename(tmp_path / "aside")
    assert not holder.is_lost(first)  # only moved away, so far
    take(tmp_path / "run", "b", FakeClock())
    assert holder.is_lost(first)


def test_a_released_lease_is_free_at_once(tmp_path: Path) -> None:
    clock = FakeClock()
    RunLease(str(tmp_path), clock).release(take(tmp_path, "a", clock))
    assert take(tmp_path, "b", clock).number == 2
    assert clock.now == FakeClock().now


def test_one_renewal_that_was_on_its_way_does_not_keep_a_dead_holder_alive(tmp_path: Path) -> None:
    first = take(tmp_path, "a", FakeClock())
    RunLease(str(tmp_path), FakeClock()).renew(first)
    assert take(tmp_path, "b", FakeClock()).number == 2


def test_a_node_whose_group_appears_during_its_watch_joins_it(tmp_path: Path) -> None:
    """The holder has taken the lease and not yet joined its group; or a store that was lost is put
    back by the nodes that live.
    """
    first, group = take(tmp_path, "a", FakeClock()), ""
    holder = RunLease(str(tmp_path), FakeClock())

    def meanwhile() -> None:
        nonlocal group
        holder.renew(first)
        group = first.token if clock.now > 1000.15 else ""

    clock = Watched(meanwhile)
    found = RunLease(str(tmp_path), clock).take(
        "a", keep_alive_s=KEEP_ALIVE_S, is_here=lambda token: token == group, notify=lambda _line: None
    )
    assert found == first


def test_a_watcher_that_stood_still_takes_no_live_holder_for_dead(tmp_path: Path) -> None:
    """It sleeps for an hour between two looks, and so did not see the renewals."""
    first = take(tmp_path, "a", FakeClock())
    holder = RunLease(str(tmp_path), FakeClock())

    def meanwhile() -> None:
        if clock.now < 2000.0:
            clock.now += 3600.0
        else:
            holder.renew(first)

    clock = Watched(meanwhile)
    with pytest.raises(UsageError, match="is in use"):
        take(tmp_path, "b", clock)


def test_each_number_of_the_lease_is_taken_once(tmp_path: Path) -> None:
    """Eight nodes at once; none joins or renews, so the others take the next number in turn."""
    clocks = [FakeClock() for _ in range(8)]
    taken: list[Lease] = []
    threads = [
        threading.Thread(target=lambda clock=clock: taken.append(take(tmp_path, "a", clock)))
        for clock in clocks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(lease.number for lease in taken) == list(range(1, 9))
    assert len({lease.token for lease in taken}) == 8


def test_only_the_node_that_leads_renews_and_a_lost_lease_is_said_once(
    tmp_path: Path, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    clock, leads, lost = SystemClock(), [False], []
    run_lease = RunLease(str(tmp_path), clock)
    lease = run_lease.take("a", keep_alive_s=0.05, is_here=lambda _: False, notify=lambda _: None)
    renewed = tmp_path / "lease" / "000001-renewed"
    renewal = LeaseRenewal(run_lease, lease, leads=lambda: leads[0], on_lost=lost.append)
    assert not renewed.exists()
    leads[0] = True
    wait_until(renewed.exists)
    (tmp_path / "lease" / "000002").write_text("{}")
    wait_until(lambda: bool(lost))
    renewal.stop(releases=True)
    (said,) = lost
    assert "another command took over the run directory" in said
    assert renewed.read_text() == "released"


def test_a_damaged_lease_is_said(tmp_path: Path) -> None:
    take(tmp_path, "a", FakeClock())
    (tmp_path / "lease" / "000001").write_text("{")
    with pytest.raises(UsageError, match="lease is damaged"):
        take(tmp_path, "b", FakeClock())
