"""The nodes of a run directory meet in one place at a time, which the directory remembers.

place/<number>   created exclusively and never changed; the highest number counts

The first node writes where it meets. A node that comes with another address asks the recorded
place: while heartbeats move there it is refused, and once none has moved for twice the keep-alive
it writes the next number, if no other node was faster. Where that place does not answer, a person
decides, by removing the folder. Two names of a host are two places: all nodes give the same one.

It does not promise to notice a copy of a run directory, nor to stop a process that stood still
for longer than twice the keep-alive: its group fences that.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, cast

from elastic.config import environment
from elastic.config.run_dir import PLACE, RunDir
from elastic.errors import UsageError
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.select import Kind, RendezvousConfig
from elastic.rendezvous.group import Name
from elastic.storage.remote import open_store
from elastic.storage.store import read_small
from elastic.system.clock import Clock
from elastic.system.silence import attended_s
from elastic.system.untrusted import bounds, decode, parse_number, pattern, printable

KEEP_ALIVES = 2  # of silence, until a place is free
START_S = 30.0  # from the first heartbeat of a node to its group, on a busy machine
MOVES_TO_BELIEVE = 2  # a heartbeat may have been on its way while its node died
LOOKS_PER_KEEP_ALIVE = 8
ALONE = "alone"  # a process without an agent, whose heartbeats lie in the run directory
NOBODY = "nobody"  # the last one has left

Text = Annotated[str, pattern("[^\x00-\x1f\x7f]{0,2000}", "an address")]
_Seconds = Annotated[float, bounds(lowest=0, below=10**6)]
Beats = Callable[[], Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """endpoint: empty for the run directory itself. who: the node that came first, in words."""

    kind: Name
    endpoint: Text = ""
    group: Name = ""
    who: Name = ""
    keep_alive_s: _Seconds = 2.0
    token: Name = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def address(self) -> tuple[str, str, str]:
        return self.kind, self.endpoint, self.group

    def __str__(self) -> str:
        named = f", group {self.group}" if self.group else ""
        return f"{self.kind} at {self.endpoint or 'the run directory'}{named} (first {self.who})"


def newest(run: RunDir, clock: Clock) -> tuple[int, Place] | None:
    """The number and the place that count. Raises UsageError where it is damaged, StoreFailed."""
    store, found = open_store(f"{run.url}/{PLACE}"), None
    number = max(filter(None, (parse_number(each.name) for each in store.list())), default=1)
    # A listing of an object store may be old.
    while (data := read_small(store, _name(number), clock)) is not None:
        found, number = (number, data), number + 1
    if found is None:
        return None
    try:
        return found[0], decode(Place, found[1], what="place")
    except ValueError as error:
        raise UsageError(f"{_removal(run)}: it is damaged, {error}") from error


def put(run: RunDir, number: int, place: Place) -> bool:
    """False where that number is taken. Raises StoreFailed."""
    return open_store(f"{run.url}/{PLACE}").create(_name(number), json.dumps(asdict(place)).encode())


def release(run: RunDir, ours: Place, clock: Clock) -> None:
    """The last process of this place ends, after which the place cannot be asked."""
    found = newest(run, clock)
    if found is not None and found[1].token == ours.token:
        put(run, found[0] + 1, Place(kind=NOBODY))


def config_of(run: RunDir, place: Place) -> RendezvousConfig:
    """Where the heartbeats of a place are; those of a process without an agent have its token."""
    if place.kind != ALONE:
        kind = cast("Kind", place.kind)
        return RendezvousConfig(kind=kind, endpoint=place.endpoint or run.rendezvous_url, group=place.group)
    endpoint = f"{run.url}/{PLACE}"
    return RendezvousConfig(kind="objects" if run.is_remote else "dir", endpoint=endpoint, group="")


def beats_at(run: RunDir, place: Place) -> Beats:
    """How to read the heartbeats of a place of this run directory.

    Raises OSError for a folder that is not there, UsageError as `RendezvousConfig.open`.
    """
    config = config_of(run, place)
    if config.kind == "dir":
        Path(config.endpoint).stat()  # opened, it would be made
    return config.open(environment.variables()).shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """One node's look at where the others of a run directory meet. beats_of: `beats_at`."""

    run: RunDir
    clock: Clock
    notify: Callable[[str], None]
    beats_of: Callable[[RunDir, Place], Beats] = beats_at

    def take(self, ours: Place, *, check: Callable[[], None] = lambda: None) -> Place:
        """The place of the run directory from now on.

        check: raises UsageError where the directory has become another run's, as it may while this
        node waits. Raises UsageError while nodes live in another place, StoreFailed.
        """
        while True:
            found = newest(self.run, self.clock)
            number, there = found or (0, None)
            is_same = there is not None and there.address == ours.address and there.kind != ALONE
            if there is not None and not is_same and there.kind != NOBODY:
                refusal = (
                    f"{self.run.url} is in use: its nodes meet in {there}, and this is {ours.kind} at"
                    f" {ours.endpoint or 'the run directory'}; give all nodes one --rdzv-backend and --rdzv-endpoint, or stop the others first"
                )
                self._check_silent(there, refusal)
            check()
            wanted = ours
            if there is not None and is_same:
                # A command that watches later waits for the beats of nodes with the longest.
                wanted = replace(there, keep_alive_s=max(there.keep_alive_s, ours.keep_alive_s))
            if wanted == there:
                return there
            if newest(self.run, self.clock) == found and put(self.run, number + 1, wanted):
                check()  # it lies in the directory that was claimed
                return wanted

    def check_lost_state(self, place: Place, is_lost: Callable[[], bool]) -> None:
        """Nodes may train on after their place to meet has lost the group: raise UsageError then.

        is_lost: whether the place knows of no group, and the run has had generations. Others that
        begin now send heartbeats before there is a group; it comes soon.
        """
        if is_lost():
            refusal = (
                f"{self.run.url} is in use: nodes train in it, and {place} has lost their group; stop them (SIGTERM: their last"
                " step is saved), then give the command again"
            )
            self._check_silent(place, refusal, is_wanted=is_lost, patience_s=START_S)

    def _check_silent(
        self,
        there: Place,
        refusal: str,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
        patience_s: float = 0.0,
    ) -> None:
        """Return once no node has been alive in a place for its limit, or as soon as not
        `is_wanted`.

        Raises UsageError with the refusal where one is alive for longer than `patience_s`.
        """
        limit_s = KEEP_ALIVES * there.keep_alive_s
        self.notify(printable(f"watching for {limit_s:.0f} s whether nodes still meet in {there}"))
        try:
            read = self.beats_of(self.run, there)
            last, moves, silence_s, began_s = read(), 0, 0.0, self.clock.monotonic()
            seen_s = began_s
            while silence_s < limit_s and is_wanted():
                self.clock.sleep(there.keep_alive_s / LOOKS_PER_KEEP_ALIVE)
                beats, now_s = read(), self.clock.monotonic()
                if beats.items() <= last.items():
                    silence_s += attended_s(now_s - seen_s, limit_s=limit_s)
                else:
                    moves, silence_s = moves + 1, 0.0
                last, seen_s = beats, now_s
                if moves >= MOVES_TO_BELIEVE and now_s - began_s > patience_s:
                    raise UsageError(refusal)
        except (BackendFailed, OSError) as error:
            raise UsageError(
                f"{_removal(self.run)}: nodes may train in {there}, which does not answer: {error}"
            ) from error


def _removal(run: RunDir) -> str:
    return f"make sure that no node trains in {run.url}, and remove {run.url}/{PLACE}"


def _name(number: int) -> str:
    return f"{number:06d}"
