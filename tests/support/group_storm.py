"""A group of up to fifty nodes in a random storm, on one simulated clock, and what must hold.

The Rendezvous, the detectors and the probes of each node are the real ones. Of the network each
direction of each link has its own delay, and may lose packets or all of them. Of the place where
the nodes meet each node sees what was there some time ago; it does not answer, it does the write or
takes the request and answers that it did not, the writer dies, or it is emptied.

A storm is a function of its seed. It does not model workers, and of what is trained only which
nodes have it.
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from elastic.errors import GroupEnded, UsageError
from elastic.rendezvous import transitions
from elastic.rendezvous.backends.backend import Backend, BackendFailed
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.group import ANY_RUN, Group, Node, RunKey
from elastic.rendezvous.heartbeat import BEATS_PER_KEEP_ALIVE, request_of
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.reachability import Probe, ProbeExchange
from elastic.rendezvous.rendezvous import Generation, Rendezvous
from elastic.testing.fakes import FakeClock, MemoryBackend

KEEP_ALIVE_S = 2.0
PROBES_PER_KEEP_ALIVE = 8
POLL_S = 0.25
# The whole history is judged now and then, and each version of it needs to be parsed once.
parsed = lru_cache(maxsize=4096)(Group.parse)


@dataclass
class Network:
    """delays_s: of each direction of each link that is slow; `cut` ones carry nothing."""

    draw: random.Random
    delays_s: dict[tuple[str, str], float] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)
    lost: float = 0.0  # of all packets

    def delay_s(self, sender: str, receiver: str) -> float | None:
        """None: it does not arrive."""
        if (sender, receiver) in self.cut or self.draw.random() < self.lost:
            return None
        return self.delays_s.get((sender, receiver), 0.001)

    def heal(self) -> None:
        self.delays_s.clear()
        self.cut.clear()
        self.lost = 0.0


class Died(Exception):  # noqa: N818 - it says what happened
    """A node dies in the middle of a call."""


@dataclass
class Door:
    """What one node sees of the place to meet. `lag_s`: it may read what was there so long ago.

    hearts: where heartbeats are kept, in memory also where nodes meet in a folder. written: all
    versions that a node has set. dies: before or after its next write. lost_answers, lost_requests:
    of so many it learns that they failed. refuses: no request can be left, or read.
    """

    shared: Backend
    hearts: MemoryBackend
    clock: FakeClock
    written: list[bytes]
    is_away: bool = False
    lag_s: float = 0.0
    lost_answers: int = 0
    lost_requests: int = 0
    refuses: bool = False
    dies: str = ""
    version: int = 0  # the newest that it has read
    seen: dict[object, tuple[float, Any]] = field(default_factory=dict)

    def read(self) -> tuple[int, bytes] | None:
        found: tuple[int, bytes] | None = self._old("value", self.shared.read)
        self.version = 0 if found is None else found[0]
        return found

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        self._answer()
        if self.dies == "before":
            raise Died
        is_set = self.shared.compare_and_set(version, value)
        self.seen.clear()
        self.written.extend([value] * is_set)
        if self.dies:
            raise Died
        if is_set and self.lost_answers:
            self.lost_answers -= 1
            return False
        return is_set

    def show(self, node_id: str, text: str) -> None:
        self._answer(self.refuses and bool(request_of(text)))
        self.hearts.show(node_id, text)
        if self.lost_requests and request_of(text):
            self.lost_requests -= 1
            raise BackendFailed("no answer")

    def shown(self, node_ids: Collection[str] | None = None) -> dict[str, str]:
        self._answer(self.refuses and node_ids is None)
        key = None if node_ids is None else frozenset(node_ids)
        found: dict[str, str] = self._old(key, lambda: self.hearts.shown(node_ids))
        return found

    def _answer(self, is_refused: bool = False) -> None:
        if self.is_away or is_refused:
            raise BackendFailed("the place to meet does not answer")

    def _old(self, key: object, read: Callable[[], object]) -> Any:
        self._answer()
        now_s = self.clock.monotonic()
        if key not in self.seen or now_s - self.seen[key][0] >= self.lag_s:
            self.seen[key] = now_s, read()
        return self.seen[key][1]


@dataclass(eq=False, kw_only=True)
class Machine:
    """A node as its agent runs it: join, train until the generation is closed, stop, join again."""

    rendezvous: Rendezvous
    door: Door
    probes: ProbeExchange
    pace_s: float = POLL_S
    is_frozen: bool = False
    is_busy: bool = False  # in a call, in which it may sleep
    is_leaving: bool = False  # it has stopped its workers, and saves what they leave behind
    holds: bool = False  # no other node has that, and nothing has hidden this node from the others
    saves: bool = False  # that state, because no other node goes on with it
    generation: Generation | None = None
    newest: int = 0  # the number of the last one that it entered
    trained: int = 0  # the one in which its newest state was made, which all members then had
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
        except (GroupEnded, UsageError) as error:
            self.over = f"{type(error).__name__} {error.exit_code}: {error}"


class Storm(FakeClock):
    """The clock is the group: while a node sleeps in a call, the others go on."""

    def __init__(self, seed: int, size: int, folder: Path | None = None, spares: int = 0) -> None:
        """folder: where the nodes meet; None: in memory, which is never emptied."""
        super().__init__()
        random.seed(seed)  # of the pauses after a lost compare-and-set
        self.draw = random.Random(seed)
        self.network = Network(random.Random(seed))
        self.folder = folder
        self.policy = GroupPolicy(min_nodes=1, max_nodes=size, last_call_s=1.0, timeout_s=1e9)
        self.machines: dict[str, Machine] = {}
        self.members: dict[int, tuple[Node, ...]] = {}  # by generation that any node entered
        self.given: dict[str, tuple[RunKey, float]] = {}  # to each node that ever started
        self.trained = 0  # the last one of these that made a step
        self.ends: list[str] = []  # what ended nodes by themselves
        self.written: list[bytes] = []
        self._memory = MemoryBackend()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        for _ in range(size + spares):
            self.start()

    # Time.

    def sleep(self, seconds: float) -> None:
        until_s = self.now + seconds
        while self._events and self._events[0][0] <= until_s:
            at_s, _, event = heappop(self._events)
            self.now = max(self.now, at_s)
            event()
        self.now = max(self.now, until_s)

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def every(self, seconds: Callable[[], float], machine: Machine, event: Callable[[], None]) -> None:
        """As long as the machine is there, and unless it is frozen."""

        def again() -> None:
            if machine not in self.machines.values():
                return
            if not machine.is_frozen:
                event()
            self.later(seconds(), again)

        self.later(self.draw.random() * seconds(), again)

    # Nodes.

    def start(self, run: RunKey = ANY_RUN, keep_alive_s: float = KEEP_ALIVE_S) -> str:
        name = f"n{next(self._numbers):05d}"
        self.given[name] = run, keep_alive_s
        door = self.open()
        probes = ProbeExchange(name, KEEP_ALIVE_S / PROBES_PER_KEEP_ALIVE)
        rendezvous = Rendezvous(
            door,
            Node(id=name, address=name, nproc=1, port=1),
            self.policy,
            keep_alive_s=keep_alive_s,
            clock=self,
            open_endpoint=lambda: f"{name}:1",
            run=run,
            min_generation=max(self.members, default=0),
            probes=probes,
            newest_generation=lambda: max(self.members, default=0),
        )
        machine = self.machines[name] = Machine(rendezvous=rendezvous, door=door, probes=probes)
        self.every(lambda: KEEP_ALIVE_S / BEATS_PER_KEEP_ALIVE, machine, lambda: self._beat(name))
        self.every(lambda: probes.interval_s, machine, lambda: self._probe(name))
        self.every(lambda: machine.pace_s, machine, lambda: self.call(name, self._poll))
        return name

    def open(self) -> Door:
        shared = self._memory if self.folder is None else DirectoryBackend(self.folder)
        return Door(shared, self._memory, self, self.written)

    def call(self, name: str, what: Callable[[str, Machine], object]) -> None:
        """Nothing, if the node is in a call. Where the place to meet fails, it is tried again."""
        machine = self.machines[name]
        if machine.is_busy:
            return
        machine.is_busy = True
        try:
            what(name, machine)
        except BackendFailed:
            pass
        except Died:
            self.machines.pop(name, None)
        finally:
            machine.is_busy = False

    def _poll(self, name: str, machine: Machine) -> None:
        before = machine.generation
        machine.poll()
        if machine.over is not None:
            self.ends.append(machine.over)
            del self.machines[name]
        if machine.generation is not None and before is None:
            self._entered(name, machine, machine.generation)

    def _entered(self, name: str, machine: Machine, generation: Generation) -> None:
        """No number is given twice, and no node steps back."""
        number = generation.number
        assert self.members.setdefault(number, generation.members) == generation.members, number
        assert generation.members[generation.rank_of_node].id == name
        assert len({self.given[node.id] for node in generation.members}) == 1, "strangers met"
        assert number > machine.newest
        machine.newest = number
        holders = [other for other, each in self.machines.items() if each.holds]
        assert not holders, f"generation {number} began while {holders} had to save the newest state"
        self.later(self.draw.choice((0.1, 0.5)), lambda: self._train(number))

    def _train(self, number: int) -> None:
        """A step, if all members are still in this generation."""
        machines = [self.machines.get(node.id) for node in self.members[number]]
        if all(m is not None and m.generation is not None and m.newest == number for m in machines):
            for machine in filter(None, machines):
                machine.trained = self.trained = number

    def _beat(self, name: str) -> None:
        # As the thread of its heartbeats does.
        heartbeat = self.machines[name].rendezvous._heartbeat
        try:
            heartbeat.beat()
            heartbeat.problem = ""
        except BackendFailed as error:
            heartbeat.problem = str(error)

    def _probe(self, name: str) -> None:
        for probe, _ in self.machines[name].probes.due(self.now):
            self._send(name, probe)

    def _send(self, sender: str, probe: Probe) -> None:
        delay_s = self.network.delay_s(sender, probe.receiver)
        if delay_s is not None:
            self.later(delay_s, lambda: self._receive(probe))

    def _receive(self, probe: Probe) -> None:
        machine = self.machines.get(probe.receiver)
        if machine is None or machine.is_frozen:
            return
        answer = machine.probes.receive(probe, self.now)
        if answer is not None:
            self._send(probe.receiver, answer[0])

    def check_history(self) -> None:
        """Generations only grow, one is open at a time, and its nodes believe what was formed."""
        groups = [parsed(value) for value in self.written]
        found = self.open().read()
        assert found is not None and found[1] == self.written[-1]
        for before, after in pairwise(groups):
            is_next = after.generation != before.generation
            assert after.generation == before.generation + is_next
            opens, resets = after.open and is_next, after.cause == transitions.NEW_RUN and not after.members
            assert opens or resets or not is_next
            assert not (before.open and opens), "a generation opened before the last was closed"
            assert not (before.open and after.open) or before.members == after.members
        formed = {group.generation: group.members for group in groups if group.open}
        assert not formed or all(formed[number] == nodes for number, nodes in self.members.items())

    # What is there.

    @property
    def live(self) -> list[str]:
        return [name for name, machine in self.machines.items() if not machine.is_frozen]

    @property
    def staying(self) -> list[str]:
        return [name for name in self.live if not self.machines[name].is_leaving]

    @property
    def training(self) -> list[str]:
        return [name for name in self.staying if self.machines[name].generation is not None]

    @property
    def group(self) -> Group:
        """The newest version, read without a node's eyes: it puts nothing back."""
        return parsed(self.written[-1]) if self.written else Group()
