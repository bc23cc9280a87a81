"""Each call of a node that asks for something fails once, and nothing takes effect late or twice.

Three nodes combine their writes at one of the four places to meet; the clients are the real ones,
and talk to the simulated servers of benchmarks/scale_servers.py.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from rendezvous_world import World
from scale_servers import Bucket, Etcd, Store, Traffic, folder

from elastic.errors import StoreFailed
from elastic.rendezvous import group_writer
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.object_store import ObjectStoreBackend
from elastic.rendezvous.group import Group
from elastic.rendezvous.group_writer import granted
from elastic.rendezvous.heartbeat import request_of
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.rendezvous import Rendezvous

KEEP_ALIVE_S = 2.0
ERRORS: dict[str, Exception] = {
    "dir": OSError(5, "Input/output error"),
    "etcd": BackendFailed("no answer"),
    "c10d": BackendFailed("no answer"),
    "objects": StoreFailed("503"),
}
SERVERS: dict[str, Any] = {"etcd": Etcd, "c10d": Store, "objects": Bucket}


class FailingTraffic(Traffic):
    """One call fails, the `fails_at`-th of those that count. is_lost: it takes effect all the same.

    before_call: called before each call that counts.
    """

    fails_at, is_lost, count, counts = 0, False, 0, False
    error: Exception
    before_call: Callable[[], None]

    def call(self, kind: str, seconds: float, effect: Callable[[], Any]) -> Any:
        if not self.counts:
            return effect()
        with self.uncounted():
            self.before_call()
            self.clock.sleep(seconds)
        self.count += 1
        if self.count != self.fails_at:
            return effect()
        if self.is_lost:
            effect()
        raise self.error

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        counts, self.counts = self.counts, False
        try:
            yield
        finally:
            self.counts = counts


class Place(World):
    """Each node has a client of its own. While one calls, slow writers read; they write later."""

    def __init__(self, kind: str, path: Path, stack: ExitStack) -> None:
        policy = GroupPolicy(min_nodes=1, max_nodes=8, last_call_s=0.5, timeout_s=60.0)
        super().__init__(policy=policy, keep_alive_s=KEEP_ALIVE_S)
        self.traffic = FailingTraffic(self.clock)  # type: ignore[arg-type]
        self.traffic.error, self.traffic.before_call = ERRORS[kind], self.read_slowly
        self.open = (
            stack.enter_context(folder(self.traffic, path))
            if kind == "dir"
            else SERVERS[kind](self.traffic).open
        )
        self.slow = self.looking()
        self.slow_writes: list[tuple[int, bytes]] = []
        for name in ("a", "b", "c"):
            self.start(name)
        while not all(m.generation and len(m.generation.members) == 3 for m in self.machines.values()):
            self.tick(0.25)

    @property
    def shown_generation(self) -> int:
        return 0

    def start(self, name: str) -> None:
        self.backend = self.open()
        super().start(name)
        self.backend = self.looking()

    def looking(self) -> Any:
        """A client that always asks."""
        client = self.open()
        if isinstance(client, ObjectStoreBackend):
            client._state_s = client._beats_s = 0.0
        return client

    def poll_all(self, but: str = "") -> None:
        with self.traffic.uncounted():
            super().poll_all(but)

    def requests(self) -> dict[str, str]:
        """What takes effect in the group as it is."""
        group = self.group
        found = [(name, request_of(text)) for name, text in self.slow.shown().items()]
        return {name: each for name, each in found if granted(group, {name: each}, dead=set()) != group}

    def read_slowly(self) -> None:
        version, value = self.slow.read()
        if requests := self.requests():
            group = granted(Group.parse(value), requests, dead=set())
            self.slow_writes.append((version, group.to_json()))

    def write_slowly(self) -> None:
        for version, value in self.slow_writes:
            self.slow.compare_and_set(version, value)

    def fails(self, name: str, act: Callable[[Rendezvous], object], fails_at: int, *, is_lost: bool) -> bool:
        """Whether the node learns that its act failed."""
        self.machines[name].is_leaving = True
        self.traffic.fails_at, self.traffic.is_lost, self.traffic.counts = fails_at, is_lost, True
        try:
            with self.calling(name):
                act(self.machines[name].rendezvous)
        except BackendFailed:
            self.clock.sleep(0.5)  # an object store is not asked again before
            return True
        finally:
            self.traffic.counts = False
        return False


ACTS: dict[str, Callable[[Rendezvous], object]] = {
    "give up joining": lambda node: node.leave(),
    "withdraw": lambda node: node.withdraw(lambda _generation: False),
    "withdraw, shared": lambda node: node.withdraw(lambda _generation: True),
    "leave": lambda node: node.leave(),
    "done": lambda node: node.done(),
}


@pytest.fixture(params=list(ERRORS))
def made(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Place]]:
    """Makes groups, each at a place of its own."""
    monkeypatch.setattr(group_writer, "COMBINES_FROM", 3)
    with ExitStack() as stack:
        paths = (tmp_path / str(number) for number in range(1000))

        def make() -> Place:
            stack.close()
            return Place(request.param, next(paths), stack)

        yield make


def each_call_fails(
    made: Callable[[], Place], name: str, what: str, *, is_lost: bool
) -> Iterator[tuple[Place, bool]]:
    """A place, and whether its node was told that the call failed, for each of the calls."""
    for fails_at in itertools.count(1):
        place = made()
        if name == "late":
            place.start(name)
            while name not in place.requests():
                place.poll(name)
        elif what == "leave":
            place.withdraw(name, is_shared=False)
        yield place, place.fails(name, ACTS[what], fails_at, is_lost=is_lost)
        if place.traffic.count < fails_at:
            break
    assert fails_at > 1


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("what", [what for what in ACTS if what != "done"])
def test_a_node_that_goes_stays_away_whichever_call_fails(
    what: str, is_lost: bool, made: Callable[[], Place]
) -> None:
    """It goes as its agent does: where it is told that its withdrawal failed it leaves all the
    same, and after that it is gone. At each of its calls a slow writer reads group and requests.
    """
    name = "late" if what == "give up joining" else "b"
    for place, is_told in each_call_fails(made, name, what, is_lost=is_lost):
        is_late = what == "leave" and is_told
        if not is_late:
            place.machines[name].rendezvous.leave()
        assert is_told or name not in place.group.member_ids | place.group.waiting_ids
        place.machines.pop(name)
        place.write_slowly()
        place.tick(2 * KEEP_ALIVE_S if is_late else 0.0)
        assert name not in place.group.member_ids | place.group.waiting_ids | place.requests().keys()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_run_is_complete_whichever_call_of_a_done_node_fails(
    is_lost: bool, made: Callable[[], Place]
) -> None:
    """It looks at the group and says again that it is done, as its agent does."""
    for place, is_told in each_call_fails(made, "b", "done", is_lost=is_lost):
        if is_told:
            place.machines["b"].rendezvous.watch()
            place.machines["b"].rendezvous.done()
        place.write_slowly()
        for name in ("a", "c"):
            place.machines[name].rendezvous.done()
        assert place.group.ended is not None and place.group.ended.exit_code == 0
