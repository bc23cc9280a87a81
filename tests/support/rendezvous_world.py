"""A simulated group: real Rendezvous objects on one fake clock, polled in turns."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import permutations

from elastic.errors import EXIT_FAILED, GroupEnded, RendezvousTimeout, UsageError
from elastic.rendezvous import transitions
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group import Group, Node, RunEnd
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.rendezvous import Generation, Rendezvous
from elastic.rendezvous.shared_settings import RunKey, SharedSettings
from elastic.testing.fakes import FakeClock, MemoryBackend

POLL_S = 0.25
# The whole history is judged after every event, and each version of it needs to be parsed once.
parsed = lru_cache(maxsize=4096)(Group.parse)


@dataclass
class Machine:
    """A node as its agent runs it: join, train until the generation is closed, stop, join again."""

    rendezvous: Rendezvous
    reasons: list[str] = field(default_factory=list)
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
        except BackendFailed as error:  # it is tried again
            self.reasons.append(str(error))
        except (GroupEnded, RendezvousTimeout, UsageError) as error:
            if isinstance(error, RendezvousTimeout):
                self.rendezvous.leave()
            self.over = f"{type(error).__name__} {error.exit_code}: {error}"

    @property
    def next_action(self) -> transitions.GroupDecision:
        """By what the node knows."""
        node, seen = self.rendezvous, self.rendezvous._observer
        return transitions.next_action(
            seen.newest, node._me, alive=seen.alive, timing=seen.timing, policy=node._policy
        )

    def __str__(self) -> str:
        frozen = "frozen, " if self.is_frozen else ""
        if self.over is not None:
            return frozen + self.over
        if self.generation is None:
            said = self.reasons[-1] if self.is_leaving else self.rendezvous._reason
            return frozen + (said or self.next_action.reason)
        return f"{frozen}in {self.generation.number} as node {self.generation.rank_of_node}"


@dataclass
class FakeProbes:
    """What one node receives from the others, as `Probes` would count it."""

    counters: dict[str, int] = field(default_factory=dict)
    peers: frozenset[str] = frozenset()

    def set_peers(self, nodes: Iterable[Node], known: Iterable[Node] = ()) -> None:
        self.peers = frozenset(node.id for node in nodes)
        self.counters = {name: count for name, count in self.counters.items() if name in self.peers}


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
    given: dict[str, SharedSettings] = field(default_factory=dict)  # to each node that ever started
    probes: dict[str, FakeProbes] = field(default_factory=dict)
    deaf: set[str] = field(default_factory=set)  # receives no packets
    mute: set[str] = field(default_factory=set)  # sends no packets

    @property
    def group(self) -> Group:
        found = self.backend.read()
        return Group() if found is None else parsed(found[1])

    @property
    def shown_generation(self) -> int:
        """The newest generation that the run directory shows to a node that starts."""
        return max((parsed(value).generation for value in self.backend.history()), default=0)

    @property
    def settings(self) -> SharedSettings:
        run = RunKey(run_id="1", uid="1", title="exact.py in runs/one")
        return SharedSettings(
            run=run,
            min_nodes=self.policy.min_nodes,
            max_nodes=self.policy.max_nodes,
            keep_alive_s=self.keep_alive_s,
        )

    @property
    def staying(self) -> list[str]:
        return [name for name, machine in self.running.items() if not machine.is_leaving]

    @property
    def running(self) -> dict[str, Machine]:
        return {i: m for i, m in self.machines.items() if not m.is_frozen and m.over is None}

    def start(self, name: str, settings: SharedSettings | None = None) -> None:
        """settings: other ones than the world's."""
        settings = self.given[name] = settings or self.settings
        policy = replace(self.policy, min_nodes=settings.min_nodes, max_nodes=settings.max_nodes)
        reasons: list[str] = []
        self.probes[name] = FakeProbes()
        rendezvous = Rendezvous(
            self.backend,
            Node(id=name, address=name, nproc=1, port=1),
            policy,
            keep_alive_s=settings.keep_alive_s,
            clock=self.clock,
            open_endpoint=lambda: f"{name}:1",
            notify=reasons.append,
            min_generation=self.shown_generation,
            probes=self.probes[name],
            run=settings.run,
            newest_generation=lambda: self.shown_generation,
        )
        self.machines[name] = Machine(rendezvous=rendezvous, reasons=reasons)

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

    def leave(self, name: str) -> None:
        machine = self.machines[name]
        machine.is_leaving = True
        with self.calling(name):
            machine.rendezvous.leave()
        self.machines.pop(name, None)

    def withdraw(self, name: str, *, is_shared: bool) -> None:
        machine = self.machines[name]
        machine.is_leaving = True
        others, trained = False, machine.rendezvous._entered
        with self.calling(name):
            others = machine.rendezvous.withdraw(lambda number: is_shared and number == trained).others_go_on
        machine.generation, machine.is_leaving, machine.holds = None, True, not others
        machine.reasons.append("others go on with its state" if others else "saves its state")

    def contradict(self, name: str) -> None:
        """A node that leaves has found another state of its step than its own."""
        machine = self.machines[name]
        run_end = RunEnd(exit_code=EXIT_FAILED, reason=f"{name} found two states of one step")
        with self.calling(name):
            machine.rendezvous.end(run_end, of_any=True)

    def fail(self, name: str, step: int) -> None:
        machine = self.machines[name]
        with self.calling(name):
            machine.rendezvous.close(transitions.FAILURE, step=step, counts=True)
        machine.generation = None

    def tick(self, seconds: float) -> None:
        for _ in range(round(seconds / POLL_S)):
            self.clock.sleep(POLL_S)
            self.poll_all()

    def reach(self, one: str, other: str) -> bool:
        """Whether packets of `one` arrive at `other`."""
        return one not in self.mute and other not in self.deaf

    def probe_all(self) -> None:
        for one, other in permutations(self.running, 2):
            probes = self.probes[other]
            if one in probes.peers and self.reach(one, other) and self.reach(other, one):
                probes.counters[one] = probes.counters.get(one, 0) + 1

    def poll_all(self, but: str = "") -> None:
        """but: a node that is in a call."""
        self.probe_all()
        for name in list(self.running):
            with suppress(BackendFailed):  # it is tried again
                self.machines[name].rendezvous._heartbeat.beat()
            if name != but and name in self.machines:
                self.poll(name)

    def poll(self, name: str) -> None:
        with self.calling(name):
            self.machines[name].poll()

    def show(self) -> list[str]:
        group = self.group
        state = "ended" if group.ended else "open" if group.open else "closed"
        members = ",".join(n.id for n in group.members) or "-"
        spare = ",".join(n.id for n in group.waiting) or "-"
        lines = [f"> generation {group.generation} {state}, cause {group.cause}, restarts {group.restarts}"]
        lines += [f"> members {members}; waiting {spare}; endpoint {group.endpoint}"]
        return lines + [f"> {name}: {machine}" for name, machine in sorted(self.machines.items())]


def other_settings(settings: SharedSettings, words: list[str]) -> SharedSettings:
    """`run=NAME` is another command, and `uid=NAME` the same one in another run
    directory.
    """
    options = dict(word.split("=") for word in words)
    run_id, uid = options.get("run", settings.run.run_id), options.get("uid", settings.run.uid)
    title = f"exact.py in runs/{options.get('uid', options.get('run', 'one'))}"
    return SharedSettings(
        run=RunKey(run_id=run_id, uid=uid, title=title),
        min_nodes=int(options.get("min", settings.min_nodes)),
        max_nodes=int(options.get("max", settings.max_nodes)),
        keep_alive_s=float(options.get("keep_alive", settings.keep_alive_s)),
    )
