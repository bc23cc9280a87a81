"""What a group of many nodes costs: the rendezvous code on a simulated clock, over each backend.

python benchmarks/scale.py [--nodes 10 100 300 1000] [--backend dir etcd c10d objects] [--json FILE]

A call takes 1 ms, to an object store 60 ms. All nodes start within 0.1 s; one is killed; then a
tenth at once; one more joins; all leave at once. Quiet load is that of ten seconds in which nothing
happens. Times count from the event until all nodes are in the generation that follows, less the
last call at the start, and less the keep-alive after a death. A look's processor time is real.
"""

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scale_clock import Process, SimulatedClock, SimulatedLock
from scale_servers import Bucket, Etcd, Store, Traffic, folder

from elastic.rendezvous import rendezvous as rendezvous_module
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.heartbeat import Heartbeat
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.rendezvous import Generation, Rendezvous
from elastic.rendezvous.transitions import NODE_JOINED, NODE_LEFT
from elastic.testing.fakes import FakeClock, MemoryBackend

LAST_CALL_S = 2.0
KEEP_ALIVE_S = {"dir": 2.0, "etcd": 2.0, "c10d": 2.0, "objects": 15.0}
STOP_S = 0.05  # to kill the workers
AGENT_POLL_S = 0.025
QUIET_S = 10.0
LIMIT_S = 600.0
LOOKS = 200
_LOCKS = type(threading.Lock()), type(threading.RLock())


class World:
    """Some nodes, one backend, one clock."""

    def __init__(
        self,
        kind: str,
        clock: SimulatedClock,
        traffic: Traffic,
        open_backend: Callable[[], Backend],
        most: int,
    ) -> None:
        self.kind, self.clock, self.traffic = kind, clock, traffic
        self.nodes: dict[str, Agent] = {}
        self._open = open_backend
        self.tries = self.versions = self.state_reads = 0
        self.policy = GroupPolicy(min_nodes=1, max_nodes=most, last_call_s=LAST_CALL_S, timeout_s=LIMIT_S)

    def start(self, count: int, within_s: float) -> None:
        for _ in range(count):
            number = len(self.nodes)
            agent = Agent(self, f"node-{number:04d}-31415-{random.getrandbits(32):08x}", number)
            self.nodes[agent.name] = agent
            agent.processes.append(
                self.clock.spawn(agent.run, agent.name, after_s=random.uniform(0.0, within_s))
            )

    def backend(self) -> Backend:
        backend = self._open()
        for name, value in vars(backend).items():
            if isinstance(value, _LOCKS):
                setattr(backend, name, SimulatedLock(self.clock))
        for name, counter in (("read", "state_reads"), ("compare_and_set", "tries")):
            setattr(backend, name, self._counted(getattr(backend, name), counter))
        return backend

    def _counted(self, call: Callable[..., Any], counter: str) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            setattr(self, counter, getattr(self, counter) + 1)
            answer = call(*arguments)
            if counter == "tries" and answer:
                self.versions += 1
            return answer

        return counted

    @property
    def live(self) -> list["Agent"]:
        return [agent for agent in self.nodes.values() if agent.is_live]

    def until_settled(self, since_s: float, less_s: float = 0.0) -> dict[str, Any]:
        """Wait until all live nodes are in one generation of exactly them."""
        before = self._figures()
        while not self._is_settled():
            if self.clock.monotonic() - since_s > LIMIT_S:
                return {"seconds": None}
            self.clock.sleep(0.01)
        seconds = max(agent.entered_s for agent in self.live) - since_s - less_s
        return {"seconds": round(seconds, 3)} | self._since(before)

    def _is_settled(self) -> bool:
        live = self.live
        first = live[0].generation
        if first is None or len(first.members) != len(live):
            return False
        return all(a.generation is not None and a.generation.number == first.number for a in live)

    def until_gone(self, since_s: float) -> dict[str, Any]:
        before = self._figures()
        while self.live:
            if self.clock.monotonic() - since_s > LIMIT_S:
                return {"seconds": None}
            self.clock.sleep(0.01)
        return {"seconds": round(self.clock.monotonic() - since_s, 3)} | self._since(before)

    def _figures(self) -> Counter[str]:
        calls = {f"calls.{kind}": count for kind, count in self.traffic.calls.items()}
        own = {"versions": self.versions, "tries": self.tries, "state_reads": self.state_reads}
        return Counter(calls | own | {"bytes": self.traffic.bytes})

    def _since(self, before: Counter[str]) -> dict[str, Any]:
        now = self._figures()
        now.subtract(before)
        return dict(now) | {"calls": sum(n for kind, n in now.items() if kind.startswith("calls."))}

    def quiet(self, seconds: float) -> dict[str, Any]:
        before = self._figures()
        self.clock.sleep(seconds)
        return {kind: value / seconds for kind, value in self._since(before).items()}


class Agent:
    """A node as its agent runs it, with workers that stop in STOP_S."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world, self.name = world, name
        self.generation: Generation | None = None
        self.entered_s = 0.0
        self.is_leaving = False
        self.is_live = True
        self.processes: list[Process] = []
        self._number = number

    def run(self) -> None:
        world, clock = self.world, self.world.clock
        node = Node(
            id=self.name, address=f"10.0.{self._number // 250}.{self._number % 250}", nproc=8, port=40000
        )
        rendezvous = Rendezvous(
            world.backend(),
            node,
            world.policy,
            keep_alive_s=KEEP_ALIVE_S[world.kind],
            clock=clock,
            open_endpoint=lambda: f"{node.address}:29500",
        )
        self.rendezvous = rendezvous
        while not self.is_leaving:
            self.generation = rendezvous.join(lambda: self.is_leaving)
            self.entered_s = clock.monotonic()
            self._train(rendezvous, self.generation)
            self.generation = None
            clock.sleep(STOP_S)
        rendezvous.withdraw(lambda _generation: True)
        rendezvous.leave()
        self.is_live = False
        rendezvous.stop()

    def _train(self, rendezvous: Rendezvous, generation: Generation) -> None:
        while True:
            view = rendezvous.watch()
            if self.is_leaving:
                rendezvous.close(NODE_LEFT, step=0, counts=False)
                return
            if view.fenced or not view.open:
                return
            if view.newcomers and generation.rank_of_node == 0:
                rendezvous.close(NODE_JOINED, step=0, counts=False)
                return
            self.world.clock.sleep(max(rendezvous.poll_s, AGENT_POLL_S))

    def kill(self) -> None:
        self.is_live = False
        for process in self.processes:
            self.world.clock.kill(process)


class SimulatedHeartbeat(Heartbeat):
    """A process of the simulated clock takes the place of the thread that sends heartbeats."""

    world: World

    def start(self) -> None:
        if not self._count:
            self._lock = nullcontext()  # type: ignore[assignment] # one process runs at a time
            self.beat()
            clock = self.world.clock
            self.world.nodes[self._node_id].processes.append(clock.spawn(self._beats, self._node_id))

    def stop(self) -> None:
        self._stopped.set()

    def _beats(self) -> None:
        while not self._stopped.is_set():
            self.world.clock.sleep(self._every_s)
            if not self._stopped.is_set():
                self.beat()


def measure(kind: str, count: int, only: set[str]) -> dict[str, Any]:
    random.seed(count)
    clock = SimulatedClock()
    traffic = Traffic(clock)
    with ExitStack() as stack:
        if kind == "dir":
            path = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            open_backend = stack.enter_context(folder(traffic, Path(path) / "rendezvous"))
        else:
            servers: dict[str, Any] = {"etcd": Etcd, "c10d": Store, "objects": Bucket}
            open_backend = servers[kind](traffic).open
        world = World(kind, clock, traffic, open_backend, most=count + 1)
        SimulatedHeartbeat.world = world
        vars(rendezvous_module)["Heartbeat"] = SimulatedHeartbeat
        began_s = time.perf_counter()
        found = {"backend": kind, "nodes": count} | _events(world, count, only)
        traffic.is_on = False
        for agent in world.live:
            agent.kill()
        return found | {"simulated_in_s": round(time.perf_counter() - began_s, 1)}


def _events(world: World, count: int, only: set[str]) -> dict[str, Any]:
    clock, found = world.clock, dict[str, Any]()
    keep_alive_s = KEEP_ALIVE_S[world.kind]
    world.start(count, within_s=0.1)
    found["start"] = world.until_settled(clock.monotonic(), LAST_CALL_S)
    if "quiet" in only:
        clock.sleep(15.0)
        found["quiet"] = world.quiet(QUIET_S)
        found["look_ms"] = look_ms(world, first=False)
        found["first_look_ms"] = look_ms(world, first=True)
    if "kill" in only:
        clock.sleep(random.uniform(0.0, 1.0))
        world.live[len(world.live) // 3].kill()
        found["one_killed"] = world.until_settled(clock.monotonic(), keep_alive_s)
    if "tenth" in only and count >= 10:
        clock.sleep(3.0)
        for agent in random.sample(world.live, count // 10):
            agent.kill()
        found["tenth_killed"] = world.until_settled(clock.monotonic(), keep_alive_s)
    if "join" in only:
        clock.sleep(3.0)
        world.start(1, within_s=0.0)
        found["one_joins"] = world.until_settled(clock.monotonic())
    if "leave" in only:
        clock.sleep(3.0)
        for agent in world.live:
            agent.is_leaving = True
        found["all_leave"] = world.until_gone(clock.monotonic())
    return found


def look_ms(world: World, *, first: bool) -> float:
    """Real processor time of one look of a node in the present group, without its backend."""
    generation = world.live[0].generation
    assert generation is not None
    node = generation.members[0 if first else len(generation.members) // 2]
    agent = world.nodes[node.id]
    value = agent.rendezvous._observer._parsed[0]
    backend, clock = MemoryBackend(), FakeClock()
    backend.compare_and_set(None, value)
    for name in world.nodes:
        backend.show(name, "0")
    looking = Rendezvous(
        backend, node, world.policy, keep_alive_s=2.0, clock=clock, open_endpoint=lambda: "h:1"
    )
    looking._entered = generation.number
    looking.watch()
    used_s = 0.0
    for look in range(LOOKS):
        clock.sleep(max(looking.poll_s, AGENT_POLL_S))
        if look % 4 == 0:
            for name in world.nodes:
                backend.show(name, str(look))
        began_s = time.thread_time()
        looking.watch()
        used_s += time.thread_time() - began_s
    return round(1000 * used_s / LOOKS, 3)


def tables(results: list[dict[str, Any]]) -> list[Table]:
    found = []
    for kind in dict.fromkeys(each["backend"] for each in results):
        table = Table("nodes", "event", "s", "versions", "tries", "state reads", "calls", "MB", title=kind)
        for each in (result for result in results if result["backend"] == kind):
            for event in ("start", "one_killed", "tenth_killed", "one_joins", "all_leave"):
                if event in each:
                    table.add_row(*_row(each, event))
            if "quiet" in each:
                quiet = each["quiet"]
                opens = sum(quiet.get(f"calls.{name}", 0.0) for name in ("open", "create"))
                per_node = f"{quiet['calls'] / each['nodes']:.1f} calls, {quiet['bytes'] / each['nodes'] / 1000:.2f} kB a node and s"
                cells = (f"{each['look_ms']} / {each['first_look_ms']} ms", f"{opens:.0f} opens/s", "", "")
                table.add_row(
                    str(each["nodes"]),
                    "quiet: " + per_node,
                    *cells,
                    f"{quiet['calls']:.0f}/s",
                    f"{quiet['bytes'] / 1e6:.2f}/s",
                )
        found.append(table)
    return found


def _row(each: dict[str, Any], event: str) -> list[str]:
    found = each[event]
    if found["seconds"] is None:
        return [str(each["nodes"]), event, f"> {LIMIT_S}", "", "", "", "", ""]
    counts = [str(found[name]) for name in ("versions", "tries", "state_reads", "calls")]
    return [str(each["nodes"]), event, f"{found['seconds']:.2f}", *counts, f"{found['bytes'] / 1e6:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 300, 1000])
    parser.add_argument(
        "--backend", nargs="+", default=["dir", "etcd", "c10d", "objects"], choices=list(KEEP_ALIVE_S)
    )
    parser.add_argument("--only", nargs="+", default=["quiet", "kill", "tenth", "join", "leave"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    Group.parse = staticmethod(lru_cache(maxsize=64)(Group.parse))  # type: ignore[method-assign]
    results = []
    for kind in args.backend:
        for count in args.nodes:
            results.append(measure(kind, count, set(args.only)))
            print(f"{kind} {count}: {results[-1]['simulated_in_s']} s", flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    for table in tables(results):
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
