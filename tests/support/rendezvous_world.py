"""A simulated group: real Rendezvous objects on one fake clock, polled in turns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache

from elastic.errors import GroupEnded, RendezvousTimeout, UsageError
from elastic.rendezvous import transitions
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.rendezvous import Generation, Rendezvous
from elastic.testing.fakes import FakeClock, MemoryBackend

POLL_S = 0.25
# The whole history is judged after every event, and each version of it needs to be parsed once.
parsed = lru_cache(maxsize=4096)(Group.parse)


@dataclass
class Machine:
    """A node as its agent runs it: join, train until the generation is closed, stop, join again."""

    rendezvous: Rendezvous
    is_frozen: bool = False
    is_leaving: bool = False  # it has stopped its workers, and saves what they leave behind
    holds: bool = False  # no other node has that, and nothing has hidden this node from the others
    generation: Generation | None = None
    over: str | None = None
    stops_in: int = 0  # polls that its workers take to stop
    stopping: int = 0

    def poll(self) -> None:
        if self.is_leaving:
            return
        if self.stopping:
            self.stopping -= 1
            return
        if self.generation is not None:
            watch = self.rendezvous.watch()
            if watch.open and watch.newcomers:
                self.rendezvous.close(transitions.NODE_JOINED, step=0, counts=False)
            elif not watch.open:
                self.generation, self.stopping = None, self.stops_in
            return
        try:
            self.generation = self.rendezvous.poll_join()
        except BackendFailed:
            pass  # it is tried again
        except (GroupEnded, RendezvousTimeout, UsageError) as error:
            if isinstance(error, RendezvousTimeout):
                self.rendezvous.leave()
            self.over = f"{type(error).__name__} {error.exit_code}: {error}"


class WorldClock(FakeClock):
    """The others go on while a node sleeps within a call."""

    def __init__(self) -> None:
        super().__init__()
        self.others: Callable[[], None] | None = None
        self._slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._slept_s += seconds
        if self.others is not None and self._slept_s >= POLL_S:
            self._slept_s, others, self.others = 0.0, self.others, None
            others()
            self.others = others


@dataclass
class World:
    policy: GroupPolicy
    keep_alive_s: float = 3.0
    backend: MemoryBackend = field(default_factory=MemoryBackend)
    clock: WorldClock = field(default_factory=WorldClock)
    machines: dict[str, Machine] = field(default_factory=dict)

    @property
    def group(self) -> Group:
        found = self.backend.read()
        return Group() if found is None else parsed(found[1])

    @property
    def shown_generation(self) -> int:
        """The newest generation that the run directory shows to a node that starts."""
        return max((parsed(value).generation for value in self.backend.history()), default=0)

    @property
    def running(self) -> dict[str, Machine]:
        return {i: m for i, m in self.machines.items() if not m.is_frozen and m.over is None}

    def start(self, name: str) -> None:
        rendezvous = Rendezvous(
            self.backend,
            Node(id=name, address=name, nproc=1, port=1),
            self.policy,
            keep_alive_s=self.keep_alive_s,
            clock=self.clock,
            open_endpoint=lambda: f"{name}:1",
            min_generation=self.shown_generation,
            newest_generation=lambda: self.shown_generation,
        )
        self.machines[name] = Machine(rendezvous=rendezvous)

    def kill(self, name: str) -> None:
        del self.machines[name]

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """While this node is in a call that may sleep, all others go on, and its heart beats."""
        before, self.clock.others = self.clock.others, lambda: self.poll_all(but=name)
        try:
            yield
        finally:
            self.clock.others = before

    def withdraw(self, name: str, *, is_shared: bool) -> None:
        machine = self.machines[name]
        machine.is_leaving = True
        trained = machine.rendezvous._entered
        with self.calling(name):
            machine.rendezvous.withdraw(lambda number: is_shared and number == trained)
        machine.generation = None

    def tick(self, seconds: float) -> None:
        for _ in range(round(seconds / POLL_S)):
            self.clock.sleep(POLL_S)
            self.poll_all()

    def poll_all(self, but: str = "") -> None:
        """but: a node that is in a call."""
        for name in list(self.running):
            with suppress(BackendFailed):  # it is tried again
                self.machines[name].rendezvous._heartbeat.beat()
            if name != but and name in self.machines:
                self.poll(name)

    def poll(self, name: str) -> None:
        with self.calling(name):
            self.machines[name].poll()
