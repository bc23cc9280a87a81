"""At one time the nodes of a run directory meet in one place, which has the directory's lease.

The lease is a number with a random token. A group has the token in its state, so a node that finds
it there has come to the same place, under whatever address. It has also come to the same directory,
and not to a copy, once it has seen the counter of live nodes move in it. A node that does not find
the token watches the lease: while its holder renews it, another place is refused; once it was not
renewed for twice the keep-alive, or was released, the next number is free. No two clocks are
compared: a watcher counts by its own, and only whether the counter moves.

lease/<number>            created exclusively, never changed: the token, the place, how long it
                          takes to find a dead holder
lease/<number>-renewed    a counter that the holder moves, or "released"; in a folder it is
                          overwritten in place, which needs no room on most file systems

Where nodes meet in the run directory itself, their heartbeats count as the counter does.

Where the directory was moved or removed under its nodes, and no other run has begun in its name,
the holder makes it the run's again and puts the lease back: a run that would begin there is refused
as before the move.

It does not promise that a holder that slept for longer notices at once that it has lost the lease:
it does at its next renewal.
"""

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from json import dumps
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from elastic.errors import ElasticError, UsageError
from elastic.rendezvous.backends.beat_files import FOLDER, BeatFiles
from elastic.rendezvous.first_look import Holder
from elastic.rendezvous.shared_settings import Name
from elastic.storage.remote import Objects, open_store
from elastic.storage.store import read_small
from elastic.system.clock import Clock
from elastic.system.files import overwrite
from elastic.system.silence import Silence
from elastic.system.untrusted import decode, parse_number

RENEWALS_PER_KEEP_ALIVE = 5
LONGEST_RENEW_S = 1.0  # a node that joins waits for one
REMOTE_RENEW_S = 3.0  # at least: each renewal is a request that costs money
STOP_S = 10.0
START_S = 60.0  # from taking the lease to the first renewal, on a busy machine
MOVES_TO_BELIEVE = 2  # the first may have been on its way while the holder died
_RELEASED = b"released"
_WIDTH = 20  # of all that is written in place of each other

_Seconds = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """place: where the nodes meet, in words. renew_s: how often the holder moves the counter."""

    number: int
    token: Name
    place: Name
    keep_alive_s: _Seconds
    renew_s: _Seconds

    @property
    def patience_s(self) -> float:
        """After so much silence the holder is dead, and so is the node that would have followed."""
        return 2 * self.keep_alive_s + 3 * self.renew_s


class Standing(Enum):
    HELD = "no other place has taken it"
    GONE = "the run directory was moved or removed, and none in its name has a lease"
    LOST = "another place has taken it, or the run directory was set aside"


class RunLease:
    """The lease of the run directory at `url`. Every method may raise StoreFailed."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._url = url
        self._store = open_store(f"{url}/lease")
        # Whose requests are short: a storage that is away must hold up no agent that ends.
        self._objects = Objects(f"{url}/lease") if "://" in url else None
        self._beats = BeatFiles(Path(url) / "rendezvous" / FOLDER) if self._objects is None else None
        self._clock = clock
        self._count = 0

    def take(
        self,
        place: str,
        *,
        keep_alive_s: float,
        holder: Callable[[str], Holder],
        check: Callable[[], None],
        notify: Callable[[str], None],
    ) -> Lease:
        """The lease with which to meet in this place.

        holder: of the lease with this token. check: raises UsageError where the run directory has
        become another run's, as it may while this node waits.
        Raises UsageError also while another place has the lease, and in a copy of the directory.
        """
        renew_s = min(keep_alive_s / RENEWALS_PER_KEEP_ALIVE, LONGEST_RENEW_S)
        if self._objects is not None:
            renew_s = max(keep_alive_s / RENEWALS_PER_KEEP_ALIVE, REMOTE_RENEW_S)
        while True:
            newest = self.newest()
            is_free = newest is None or self._is_free(newest, place, holder, notify)
            check()
            if newest is not None and not is_free:
                return newest
            if newest is not None and self.newest() != newest:
                continue  # another node was faster, or the directory was replaced meanwhile
            ours = Lease(
                number=1 if newest is None else newest.number + 1,
                token=secrets.token_hex(8),
                place=place,
                keep_alive_s=keep_alive_s,
                renew_s=renew_s,
            )
            if self._store.create(_name(ours.number), dumps(asdict(ours)).encode()):
                self._checked(ours, check)
                return ours

    def newest(self) -> Lease | None:
        numbers = (parse_number(each.name) for each in self._store.list())
        number = max(filter(None, numbers), default=0)
        found = None
        # A listing of an object store may be old.
        while (data := read_small(self._store, _name(max(1, number)), self._clock)) is not None:
            found, number = data, max(1, number) + 1
        if found is None:
            return None
        try:
            return decode(Lease, found, what="lease")
        except ValueError as error:
            raise UsageError(
                f"{self._url}/lease is damaged: {error}; stop all that train in {self._url} and remove it"
            ) from error

    def renew(self, lease: Lease) -> None:
        self._count += 1
        self._write(lease, b"%d" % self._count)

    @staticmethod
    def counter_name(lease: Lease) -> str:
        """Of what `renew` writes, below the run directory."""
        return f"lease/{_renewed(lease.number)}"

    def release(self, lease: Lease) -> None:
        """The last node of the place has left."""
        self._write(lease, _RELEASED)

    def is_released(self, lease: Lease) -> bool:
        return (self._read_now(_renewed(lease.number)) or b"").strip() == _RELEASED

    def standing(self, lease: Lease) -> Standing:
        own = self._read_now(_name(lease.number))
        if own is None:
            return Standing.GONE if self.newest() is None else Standing.LOST
        is_last = lease.token.encode() in own and self._read_now(_name(lease.number + 1)) is None
        return Standing.HELD if is_last else Standing.LOST

    def put_back(self, lease: Lease) -> None:
        """Where it is gone, unless another place is faster."""
        self._store.create(_name(lease.number), dumps(asdict(lease)).encode())

    def _checked(self, ours: Lease, check: Callable[[], None]) -> None:
        """What was just created lies in the directory that was claimed, or is gone again.

        Also where this command is told to leave meanwhile: the next one would wait for long for the
        first renewal.
        """
        try:
            check()
        except BaseException:
            self._store.delete(_name(ours.number))
            raise
        if self._objects is None:
            with suppress(OSError):  # if it finds no room, the first renewal may
                self._write(ours, b"")  # from now on a renewal needs none

    def _is_free(
        self, lease: Lease, place: str, holder: Callable[[str], Holder], notify: Callable[[str], None]
    ) -> bool:
        """Wait until the holder is found dead (True) or in this place and directory (False).

        Raises UsageError when it is alive in another place, or in another directory.
        """
        renewed, beats = self._read(lease), self._read_beats()
        moves, silence, seen_s = 0, Silence(), self._clock.monotonic()
        has_notified = False
        while silence.seconds < (limit_s := _limit_s(lease, renewed)):
            found_holder = holder(lease.token)
            if renewed == _RELEASED and found_holder is not Holder.ALIVE:
                return True
            if found_holder is Holder.SILENT or (found_holder is Holder.ALIVE and moves):
                return False
            if not has_notified and found_holder is Holder.ELSEWHERE:
                notify(f"watching for {limit_s:.0f} s at most whether {lease.place} still uses {self._url}")
                has_notified = True
            self._clock.sleep(lease.renew_s / 4)
            now_s, last, last_beats = self._clock.monotonic(), renewed, beats
            renewed, beats = self._read(lease), self._read_beats()
            if renewed != last or any(last_beats.get(node) != count for node, count in beats.items()):
                moves, silence = moves + 1, Silence()
                if self._read_now(_name(lease.number + 1)) is not None:
                    return True  # and the next number is not free: its nodes may send heartbeats here
            else:
                silence = silence.grow(now_s - seen_s, limit_s=limit_s)
            seen_s = now_s
            if moves >= MOVES_TO_BELIEVE and renewed != _RELEASED and holder(lease.token) is Holder.ELSEWHERE:
                if lease.place == place:
                    raise UsageError(
                        f"{self._url} is in use: nodes that met in {place} train in it, and are not found there any more; has it lost"
                        " its data? Stop them first (SIGTERM: their last step is saved), then give the command again"
                    )
                raise UsageError(
                    f"{self._url} is in use: {lease.place} trains in it, and this is {place}. Give all nodes the same --rdzv-backend,"
                    " --rdzv-endpoint and --rdzv-id, stop the other first, or take another --run-dir"
                )
        if holder(lease.token) is Holder.ALIVE:
            raise UsageError(
                f"the run directory is not shared: {self._url} is a copy of the one in which the nodes of {place} train, or they cannot"
                " write there. Give all nodes a --run-dir in a folder that they share, or a URL. If the copy is to be a run of its own,"
                f" remove {self._url}/uid and {self._url}/lease, and give another --rdzv-id or --rdzv-endpoint"
            )
        return True

    def _read(self, lease: Lease) -> bytes:
        return (read_small(self._store, _renewed(lease.number), self._clock) or b"").strip()

    def _read_beats(self) -> dict[str, int]:
        """Of nodes that meet in the run directory."""
        with suppress(OSError):
            return {} if self._beats is None else self._beats.read(None)
        return {}

    def _read_now(self, name: str) -> bytes | None:
        if self._objects is not None:
            return self._objects.read(name)
        return read_small(self._store, name, self._clock)

    def _write(self, lease: Lease, text: bytes) -> None:
        name = _renewed(lease.number)
        if self._objects is not None:
            self._objects.write(name, text)
        else:
            overwrite(Path(self._url) / "lease" / name, text.ljust(_WIDTH))


class LeaseRenewal:
    """Renews a lease on a thread of its own, until `stop`, while `leads()`.

    One node does it for all. A node that is not in the group yet also does it where the last one
    has released the lease that both share. may_lead: whether the one that leads may be dead; a
    lease that is held is then renewed as well, by several nodes perhaps, and nothing else is done.
    on_lost is called once, with a sentence, when another place has taken the lease. lease_of_group:
    the token under which this node's group meets; where that is the newest lease's, it is renewed
    from then on. reclaim: makes the directory the run's where it is gone, False where it has become
    another run's; None: the lease is not put back.
    """

    def __init__(  # noqa: PLR0913 - the seam of the lease to the group and the agent
        self,
        run_lease: RunLease,
        lease: Lease,
        *,
        leads: Callable[[], bool],
        is_in: Callable[[], bool],
        on_lost: Callable[[str], None],
        may_lead: Callable[[], bool] = lambda: False,
        lease_of_group: Callable[[], str] = lambda: "",
        reclaim: Callable[[], bool] | None = None,
    ) -> None:
        self._run_lease, self._lease, self._reclaim = run_lease, lease, reclaim
        self._leads, self._may_lead, self._is_in, self._on_lost = leads, may_lead, is_in, on_lost
        self._lease_of_group = lease_of_group
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def stop(self, *, releases: bool) -> None:
        """releases: no node is left in this place."""
        self._stopped.set()
        self._thread.join(STOP_S)
        if releases and not self._thread.is_alive():
            with suppress(ElasticError, OSError):  # the next one waits for the silence
                # A directory in which it is not held may be another run's.
                if self._run_lease.standing(self._lease) is Standing.HELD:
                    self._run_lease.release(self._lease)

    def _run(self) -> None:
        has_lost = was_gone = was_lost = False
        while not self._stopped.wait(self._lease.renew_s):
            # A storage that is away for a while ends no training, and so not this thread.
            with suppress(ElasticError, OSError):
                if has_lost or not self._renews():
                    if not has_lost and self._may_lead():
                        self._renew_if_held()
                    continue
                standing = self._run_lease.standing(self._lease)
                # At the second look: a command with --fresh renames, and then claims the name.
                if standing is Standing.GONE and was_gone and self._reclaim is not None:
                    standing = Standing.HELD if self._reclaim() else Standing.LOST
                    if standing is Standing.HELD:
                        self._run_lease.put_back(self._lease)
                if standing is Standing.LOST and self._adopts_newest():
                    standing = Standing.HELD
                # At the second look here too: a node that stood still has read its group by then.
                has_lost = standing is Standing.LOST and (was_lost or was_gone)
                was_gone, was_lost = standing is Standing.GONE, standing is Standing.LOST
                if has_lost:
                    self._on_lost(
                        "another command took over the run directory while this one stood still, or after it was moved or set aside"
                    )
                elif standing is Standing.HELD:
                    self._run_lease.renew(self._lease)

    def _renew_if_held(self) -> None:
        if self._run_lease.standing(self._lease) is Standing.HELD:
            self._run_lease.renew(self._lease)

    def _adopts_newest(self) -> bool:
        """Whether the newest lease is that of this node's own group, which is then its own."""
        with suppress(UsageError):  # it is damaged
            newest = self._run_lease.newest()
            if newest is not None and newest.token == self._lease_of_group():
                self._lease = newest
                return True
        return False

    def _renews(self) -> bool:
        return self._leads() or (not self._is_in() and self._run_lease.is_released(self._lease))


def _limit_s(lease: Lease, renewed: bytes) -> float:
    """How long to watch. A holder that never renewed it yet is still starting, and not dead."""
    return lease.patience_s if renewed else max(START_S, lease.patience_s)


def _name(number: int) -> str:
    return f"{number:06d}"


def _renewed(number: int) -> str:
    return f"{number:06d}-renewed"
