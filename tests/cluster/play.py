"""Carries out a scenario's commands on a cluster, one after the other; what they wait for is an event, and a wait that cannot end says so at once.

It does not judge: it gives back what is to be judged.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from cluster import SHARED, Cluster
from image import ROOT
from oracle import Evidence, Record, Struck
from scenario import Command, Deed, End, Hold, Open, Release, Scenario, Shut, Stands, Start, Strike, Until

from elastic.checkpoint.catalog import committed, verify
from elastic.checkpoint.fsspec_store import open_store
from elastic.clock import SystemClock
from elastic.observe import metrics
from elastic.observe.log import read_events
from elastic.run_dir import RunDir

TINY = ROOT / "tests" / "process" / "recipes" / "tiny.py"
# Every node keeps every step in memory; the group waits for all of the first nodes; a node that is silent for 2 s is out.
SAVES = ("--save-every", "4steps", "--keep", "99")
STANDING = (*SAVES, "--snapshot-every", "1", "--last-call", "10min", "--keep-alive", "2")
_ENV = {
    "TINY_GATES": f"{SHARED}/gates",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
PATIENCE_S = 240.0
LOOK_S = 0.02
ALIVE_LOOK_S = 2.0
CUTS = {Deed.CUT: ("INPUT", "OUTPUT"), Deed.DEAFEN: ("INPUT",), Deed.MUTE: ("OUTPUT",)}


class WentWrong(Exception):  # noqa: N818 - the scenario did, and it says how
    """A scenario could not be carried out as written."""


def evidence(run: RunDir, struck: Sequence[Struck] = ()) -> Evidence:
    """All that a run left behind; every checkpoint is read."""
    store, clock = open_store(run.checkpoints_url), SystemClock()
    records, _ = committed(store, clock)
    return Evidence(
        events=read_events(run.events),
        metrics=metrics.read(run.metrics),
        commits=[{"step": record.step, "digest": record.digest} for record in records],
        damage=[f"step {damage.step}: {damage.reason}" for damage in verify(store, clock)],
        struck=struck,
    )


class Play:
    """One performance of one scenario."""

    def __init__(self, scenario: Scenario, cluster: Cluster) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self.run = RunDir.parse(str(cluster.shared / "run"))
        self._gates = cluster.shared / "gates"
        self._struck: list[Struck] = []
        self._ended: set[str] = set()
        self._paused: list[str] = []
        self._cut: list[str] = []
        self._unplugged: list[str] = []

    def perform(self) -> Evidence:
        """Raises WentWrong."""
        self._gates.mkdir()
        self._gates.chmod(0o777)
        for command in self._scenario.commands:
            self._do(command)
        return evidence(self.run, self._struck)

    def _do(self, command: Command) -> None:
        match command:
            case Start():
                for _ in range(command.nodes):
                    self._cluster.start(self._words(command), _ENV)
            case Shut():
                for step in command.steps:
                    (self._gates / f"gate-{step}").touch()
            case Open():
                (self._gates / f"go-{command.step}").touch()
            case Stands():
                self._waits_for(
                    lambda: self._stands(command.step), f"all ranks to stand before step {command.step}"
                )
            case Until():
                self._waits_for(lambda: self._happened(command), f"{command.event} {command.fields}")
            case Hold():
                time.sleep(command.seconds)
            case Strike():
                self._strike(command)
            case Release():
                self._release()
            case End():
                self._end(command.codes)

    def _words(self, start: Start) -> list[str]:
        # The group begins when all nodes of the start are there, however late the last one comes.
        nodes = ("--max-nodes", str(start.nodes))
        words = ["-m", "elastic.cli", str(TINY), "--run-dir", f"{SHARED}/run"]
        return [*words, *STANDING, *nodes, *self._scenario.options, *start.options]

    # Deeds.

    def _strike(self, strike: Strike) -> None:
        nodes = self._nodes(strike.ranks)
        self._struck.append(self._now())
        if strike.is_worker:
            self._kill_workers(strike.ranks or ())
            return
        match strike.deed:
            case Deed.KILL:
                self._cluster.signal("KILL", *nodes)
            case Deed.TERMINATE:
                self._cluster.signal("TERM", *nodes)
            case Deed.PAUSE:
                self._cluster.pause(*nodes)
                self._paused += nodes
            case Deed.CUT | Deed.DEAFEN | Deed.MUTE:
                for node in nodes:
                    self._cluster.cut(node, *CUTS[strike.deed])
                self._cut += nodes
            case Deed.UNPLUG:
                for node in nodes:
                    self._cluster.unplug(node)
                self._unplugged += nodes

    def _kill_workers(self, ranks: tuple[int, ...]) -> None:
        for worker in self._workers(ranks):
            self._cluster.signal_process("KILL", _host(worker), int(worker["pid"]))

    def _release(self) -> None:
        if self._paused:
            self._cluster.unpause(*self._paused)
        for node in self._cut:
            self._cluster.heal(node)
        for node in self._unplugged:
            self._cluster.plug(node)
        self._paused, self._cut, self._unplugged = [], [], []

    def _end(self, codes: tuple[int, ...]) -> None:
        left = [node for node in self._cluster.nodes if node not in self._ended]
        found = self._cluster.wait(*left)
        self._ended |= set(left)
        if sorted(found.values()) != list(codes):
            raise WentWrong(f"expected the exit codes {list(codes)}, found {found}")

    def _now(self) -> Struck:
        newest, start = metrics.newest(self.run.metrics), self._newest()
        return Struck(
            time=time.time(),
            step=0 if newest is None else int(newest["step"]),
            generation=0 if start is None else int(start["generation"]),
        )

    # Who is who.

    def _nodes(self, ranks: tuple[int, ...] | None) -> list[str]:
        if ranks is None:
            return self._cluster.running()
        return list(dict.fromkeys(_host(worker) for worker in self._workers(ranks)))

    def _workers(self, ranks: tuple[int, ...]) -> list[Record]:
        """Of the newest generation, in the order of `ranks`."""

        def told() -> list[Record] | None:
            start = self._newest()
            if start is None:
                return None
            there = self._events("worker_started", generation=start["generation"])
            by_rank = {event["rank"]: event for event in there}
            return [by_rank[rank] for rank in ranks] if by_rank.keys() >= set(ranks) else None

        found: list[Record] = self._waits_for(told, f"workers of ranks {ranks}")
        return found

    # What is waited for.

    def _stands(self, step: int) -> bool:
        start = self._newest()
        if start is None or self._events("generation_ended", generation=start["generation"]):
            return False
        # A file of an older generation says nothing of this one.
        paths = [self._gates / f"at-{step}-rank{rank}" for rank in range(start["world_size"])]
        return all(path.exists() and path.stat().st_mtime >= start["time"] for path in paths)

    def _happened(self, until: Until) -> bool:
        return bool(self._events(until.event, **until.fields))

    def _newest(self) -> Record | None:
        return next(reversed(self._events("generation_started")), None)

    def _events(self, name: str, **fields: Any) -> list[Record]:
        found = [event for event in read_events(self.run.events) if event["event"] == name]
        return [event for event in found if all(_field(event, key) == value for key, value in fields.items())]

    def _waits_for(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value; an end of all nodes, or PATIENCE_S, ends the waiting."""
        deadline = time.monotonic() + PATIENCE_S
        look_s = time.monotonic() + ALIVE_LOOK_S
        while not (value := condition()):
            now_s = time.monotonic()
            if now_s > look_s:
                look_s = now_s + ALIVE_LOOK_S
                if not self._cluster.running() and not condition():
                    raise WentWrong(f"expected {what}, but all nodes have ended")
            if now_s > deadline:
                raise WentWrong(f"expected {what} within {PATIENCE_S:.0f} s, found none")
            time.sleep(LOOK_S)
        return value


def _field(event: Record, key: str) -> Any:
    return _host(event) if key == "node" else event.get(key)


def _host(event: Record) -> str:
    """A node's id begins with its host name, which is the container's."""
    return str(event["node"]).split("-", maxsplit=1)[0]
