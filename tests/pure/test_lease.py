"""The lease of a run directory, on a folder and a clock that the test moves."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import UsageError
from elastic.rendezvous.first_look import Holder
from elastic.rendezvous.lease import Lease, LeaseRenewal, RunLease, Standing
from elastic.system.clock import Clock, SystemClock
from elastic.system.files import replace_whole
from elastic.system.interrupt import Terminated
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


def taken(folder: Path, place: str, clock: Clock, holder: Callable[[str], Holder], **options: Any) -> Lease:
    options = {"keep_alive_s": KEEP_ALIVE_S, "check": lambda: None} | options
    return RunLease(str(folder), clock).take(place, holder=holder, notify=lambda _line: None, **options)


def take(
    folder: Path, place: str, clock: Clock, here: str = "", group: Holder = Holder.SILENT, **options: Any
) -> Lease:
    """here: the token that the group in this place has. group: what shows of its nodes."""
    return taken(folder, place, clock, lambda token: group if token == here else Holder.ELSEWHERE, **options)


def renewing(folder: Path, lease: Lease) -> Watched:
    """The clock of a watcher, at each of whose looks the holder has renewed the lease."""
    holder = RunLease(str(folder), FakeClock())
    return Watched(lambda: holder.renew(lease))


def test_the_first_place_gets_the_lease_and_its_other_nodes_share_it(tmp_path: Path) -> None:
    """They find its token in the group, and wait for one renewal; for none where all are dead."""
    first = take(tmp_path, "a", FakeClock())
    clock = renewing(tmp_path, first)
    began_s = clock.now
    assert take(tmp_path, "also a", clock, here=first.token, group=Holder.ALIVE) == first
    assert clock.now - began_s <= first.renew_s
    clock = FakeClock()
    assert take(tmp_path, "also a", clock, here=first.token) == first
    assert clock.now == FakeClock().now


def test_a_copy_of_the_directory_is_not_taken_for_the_directory(tmp_path: Path) -> None:
    """Its group lives, and renews the lease in the directory that was copied."""
    first = take(tmp_path / "run", "a", FakeClock())
    RunLease(str(tmp_path / "run"), FakeClock()).renew(first)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(UsageError, match="is a copy of the one in which the nodes of a train"):
        take(tmp_path / "copy", "a", renewing(tmp_path / "run", first), here=first.token, group=Holder.ALIVE)


def test_a_directory_that_became_another_ones_during_the_wait_is_left_alone(tmp_path: Path) -> None:
    """Before the lease is created, and in the very moment in which it is."""
    found: list[bool] = []

    def check() -> None:
        if not found.pop():
            raise UsageError("set aside")

    for found[:] in ([False], [False, True]):
        with pytest.raises(UsageError, match="set aside"):
            take(tmp_path, "a", FakeClock(), check=check)
        assert RunLease(str(tmp_path), FakeClock()).newest() is None


def test_a_lease_that_another_node_takes_first_is_watched_in_its_turn(tmp_path: Path) -> None:
    """Two nodes of one place watch a dead one. The first to take the next number joins and renews
    it, and its heartbeats move in the directory; the other one shares it.
    """
    dead = take(tmp_path, "a", FakeClock())
    RunLease(str(tmp_path), FakeClock()).renew(dead)
    beats = tmp_path / "rendezvous" / "beats"
    beats.mkdir(parents=True)
    second: list[Lease] = []

    def meanwhile() -> None:
        if clock.now > 1004.0:
            if not second:
                second.append(take(tmp_path, "b", FakeClock(), check=lambda: None))
            holder.renew(second[0])
            replace_whole(beats / "b", b"%d" % int(clock.now * 100), fsync=False)

    holder, clock = RunLease(str(tmp_path), FakeClock()), Watched(meanwhile)

    def group(token: str) -> Holder:
        return Holder.ALIVE if second and token == second[0].token else Holder.ELSEWHERE

    assert taken(tmp_path, "b", clock, group) == second[0]


def test_heartbeats_in_the_run_directory_keep_a_lease_that_cannot_be_renewed(tmp_path: Path) -> None:
    """As on a full disk of a file system that copies on write."""
    first = take(tmp_path, "a", FakeClock())
    RunLease(str(tmp_path), FakeClock()).renew(first)
    beats = tmp_path / "rendezvous" / "beats"
    beats.mkdir(parents=True)
    replace_whole(beats / "a", b"1", fsync=False)
    clock = Watched(lambda: replace_whole(beats / "a", b"%d" % int(clock.now * 100), fsync=False))
    with pytest.raises(UsageError, match="is in use"):
        take(tmp_path, "b", clock)


def test_a_renewal_is_written_in_place(tmp_path: Path) -> None:
    """From the first one on it needs no room: the file was made with the lease."""
    first, holder = take(tmp_path, "a", FakeClock()), RunLease(str(tmp_path), FakeClock())
    path = tmp_path / "lease" / "000001-renewed"
    about = path.stat()
    for write in (holder.renew, holder.renew, holder.release):
        write(first)
        assert (path.stat().st_ino, path.stat().st_size) == (about.st_ino, about.st_size)
    assert holder.is_released(first)


@pytest.mark.parametrize("raised", [Terminated, UsageError("another run's")])
def test_a_command_that_ends_as_it_takes_the_lease_leaves_none(
    tmp_path: Path, raised: type[BaseException] | BaseException
) -> None:
    """The next one would watch for a minute whether it starts."""

    def check() -> None:
        if (tmp_path / "lease" / "000001").exists():
            raise raised

    with pytest.raises((Terminated, UsageError)):
        RunLease(str(tmp_path), FakeClock()).take(
            "a", keep_alive_s=1.0, holder=lambda _: Holder.ELSEWHERE, check=check, notify=print
        )
    assert RunLease(str(tmp_path), FakeClock()).newest() is None


def test_nodes_that_are_not_found_where_they_met_are_said(tmp_path: Path) -> None:
    """The place has lost its data: to name it as another place would contradict itself."""
    first = take(tmp_path, "etcd at h, group g", FakeClock())
    with pytest.raises(
        UsageError, match="nodes that met in etcd at h, group g train in it, and are not found"
    ):
        take(tmp_path, "etcd at h, group g", renewing(tmp_path, first))


def test_another_place_is_refused_while_the_holder_renews(tmp_path: Path) -> None:
    first = take(tmp_path, "a", FakeClock())
    with pytest.raises(UsageError, match="is in use: a trains in it, and this is b"):
        take(tmp_path, "b", renewing(tmp_path, first))
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
    assert holder.standing(first) is Standing.LOST and holder.standing(second) is not Standing.LOST


def test_a_holder_that_is_still_starting_is_not_taken_for_dead(tmp_path: Path) -> None:
    """It renews the lease for the first time once it is in the group, which then has its token."""
    first, clock = take(tmp_path, "a", FakeClock()), FakeClock()
    began_s = clock.now

    def group(token: str) -> Holder:
        is_in = token == first.token and clock.now - began_s > 4 * first.patience_s
        return Holder.SILENT if is_in else Holder.ELSEWHERE

    assert taken(tmp_path, "a", clock, group) == first


def test_a_lease_of_a_directory_that_was_set_aside_is_lost(tmp_path: Path) -> None:
    """A new run has the name, and a lease with the same number."""
    holder = RunLease(str(tmp_path / "run"), FakeClock())
    first = take(tmp_path / "run", "a", FakeClock())
    assert holder.standing(first) is not Standing.LOST
    (tmp_path / "run").rename(tmp_path / "aside")
    assert holder.standing(first) is not Standing.LOST  # only moved away, so far
    take(tmp_path / "run", "b", FakeClock())
    assert holder.standing(first) is Standing.LOST


def test_a_directory_that_was_replaced_during_the_wait_is_watched_like_any_other(tmp_path: Path) -> None:
    """Of two commands with --fresh the second waits for the first one's lease, which went aside
    with the old run; by then the new run has a lease with a lower number.
    """
    take(tmp_path / "run", "a", FakeClock(), keep_alive_s=0.1)
    take(tmp_path / "run", "--fresh", FakeClock())
    other: list[Lease] = []

    def meanwhile() -> None:
        if clock.now > 1030.0:
            if not other:
                (tmp_path / "run").rename(tmp_path / "aside")
                other.append(take(tmp_path / "run", "b", FakeClock()))
            holder.renew(other[0])

    holder, clock = RunLease(str(tmp_path / "run"), FakeClock()), Watched(meanwhile)
    with pytest.raises(UsageError, match="is in use: b trains in it"):
        take(tmp_path / "run", "--fresh", clock)
    assert holder.newest() == other[0]


def test_a_released_lease_is_free_at_once(tmp_path: Path) -> None:
    clock = FakeClock()
    RunLease(str(tmp_path), clock).release(take(tmp_path, "a", clock))
    assert take(tmp_path, "b", clock).number == 2
    assert clock.now == FakeClock().now


def test_a_released_lease_under_live_nodes_is_theirs(tmp_path: Path) -> None:
    """The last node released it in the moment in which the next one came, which renews it then."""
    first = take(tmp_path, "a", FakeClock())
    holder = RunLease(str(tmp_path), FakeClock())
    holder.release(first)
    clock = Watched(lambda: holder.renew(first))
    assert take(tmp_path, "a", clock, here=first.token, group=Holder.ALIVE) == first


def test_a_lease_that_was_released_under_a_node_that_comes_is_renewed_by_it(
    tmp_path: Path, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    """It shares the lease and is not in the group yet; once it is, only the first node renews."""
    run_lease, is_in = RunLease(str(tmp_path), SystemClock()), [False]
    lease = take(tmp_path, "a", SystemClock(), keep_alive_s=0.05)
    renewal = LeaseRenewal(
        run_lease, lease, leads=lambda: False, is_in=lambda: is_in[0], on_lost=lambda _sentence: None
    )
    run_lease.release(lease)
    wait_until(lambda: not run_lease.is_released(lease))
    renewal.stop(releases=False)


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_lease_whose_directory_was_moved_is_put_back_if_the_name_is_still_the_runs(
    tmp_path: Path, wait_until: Callable[[Callable[[], bool]], None], *, is_ours: bool
) -> None:
    """A node of another place is refused as before; where another run has the name, it is said."""
    run, lost = tmp_path / "run", []
    run_lease = RunLease(str(run), SystemClock())
    lease = take(run, "a", SystemClock(), keep_alive_s=0.05)
    run.rename(tmp_path / "moved")
    renewal = LeaseRenewal(
        run_lease,
        lease,
        leads=lambda: True,
        is_in=lambda: True,
        on_lost=lost.append,
        reclaim=lambda: is_ours,
    )
    wait_until(lambda: run_lease.newest() == lease if is_ours else bool(lost))
    if is_ours:
        with pytest.raises(UsageError, match="is in use: a trains in it"):
            take(run, "b", SystemClock())
    renewal.stop(releases=True)
    assert run_lease.newest() == (lease if is_ours else None) and bool(lost) is not is_ours
    assert run_lease.is_released(lease) is is_ours


def test_a_lost_lease_is_not_released(tmp_path: Path) -> None:
    """The directory was set aside, and another run has a lease with the same number there."""
    run_lease = RunLease(str(tmp_path / "run"), FakeClock())
    lease = take(tmp_path / "run", "a", FakeClock())
    renewal = LeaseRenewal(
        run_lease, lease, leads=lambda: False, is_in=lambda: True, on_lost=lambda _sentence: None
    )
    (tmp_path / "run").rename(tmp_path / "aside")
    other = take(tmp_path / "run", "b", FakeClock())
    renewal.stop(releases=True)
    assert not run_lease.is_released(other)


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
    found = taken(tmp_path, "a", clock, lambda token: Holder.ALIVE if token == group else Holder.ELSEWHERE)
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
    lease = take(tmp_path, "a", clock, keep_alive_s=0.05)
    renewed = tmp_path / "lease" / "000001-renewed"
    renewal = LeaseRenewal(run_lease, lease, leads=lambda: leads[0], is_in=lambda: True, on_lost=lost.append)
    assert not renewed.read_text().strip()
    leads[0] = True
    wait_until(lambda: bool(renewed.read_text().strip()))
    (tmp_path / "lease" / "000002").write_text("{}")
    wait_until(lambda: bool(lost))
    renewal.stop(releases=True)
    (said,) = lost
    assert "another command took over the run directory" in said
    assert not run_lease.is_released(lease)


def test_a_node_that_may_lead_renews_only_what_it_holds(
    tmp_path: Path, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    """It cannot poll, so it may have slept, and knows no newer lease of its own group yet: to end
    because of that one would be wrong.
    """
    looks, lost = [], []
    run_lease = RunLease(str(tmp_path), SystemClock())
    lease = take(tmp_path, "a", SystemClock(), keep_alive_s=0.05)
    renewed = tmp_path / "lease" / "000001-renewed"

    def may_lead() -> bool:
        looks.append(1)
        return True

    renewal = LeaseRenewal(
        run_lease, lease, leads=lambda: False, is_in=lambda: True, may_lead=may_lead, on_lost=lost.append
    )
    wait_until(lambda: bool(renewed.read_text().strip()))
    (tmp_path / "lease" / "000002").write_text("{}")
    seen = len(looks)
    wait_until(lambda: len(looks) > seen + 4)
    renewal.stop(releases=False)
    assert not lost


def test_a_damaged_lease_is_said(tmp_path: Path) -> None:
    take(tmp_path, "a", FakeClock())
    (tmp_path / "lease" / "000001").write_text("{")
    with pytest.raises(UsageError, match="lease is damaged"):
        take(tmp_path, "b", FakeClock())
