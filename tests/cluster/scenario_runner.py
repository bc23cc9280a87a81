"""Carries out a scenario's commands on a cluster, one after the other; what they wait for is an event, and a wait that cannot end says so at once.

It does not judge: it gives back what is to be judged.
"""

import time
from collections.abc import Callable
from typing import Any

from cluster import SCRATCH, SHARED, Cluster
from etcd_members import Members
from evidence import evidence, field, host
from image import ROOT
from oracle import Evidence, Record, Struck
from run_storage import InFolder, InStore, Where
from scenario import (
    Again,
    Command,
    Deed,
    End,
    Harm,
    Hold,
    Open,
    Release,
    Scenario,
    Shut,
    Stands,
    Start,
    Storage,
    Strike,
    Until,
)
from volume import Volume, WallClocks

TINY = ROOT / "tests" / "process" / "recipes" / "tiny.py"
# Every node keeps every step in memory; the group waits for all of the first nodes.
SAVES = ("--save-every", "4steps", "--keep", "99")
STANDING = (*SAVES, "--snapshot-every", "1", "--last-call", "10min")
_ENV = {
    "TINY_GATES": f"{SHARED}/gates",
    "TINY_SAMPLES": f"{SHARED}/samples",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    # Said already, so that an agent does not begin anew to say it.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
PATIENCE_S = 240.0
LOOK_S = 0.02
CUTS = {Deed.CUT: ("INPUT", "OUTPUT"), Deed.DEAFEN: ("INPUT",), Deed.MUTE: ("OUTPUT",)}


class WentWrong(Exception):  # noqa: N818 - the scenario did, and it says how
    """A scenario could not be carried out as written."""


class Play:
    """One performance of one scenario."""

    def __init__(self, scenario: Scenario, cluster: Cluster) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._members = Members(cluster, scenario.members)
        self._store = InStore(cluster) if scenario.has_store else None
        self._where: Where = self._store or InFolder(cluster)
        self._gates = cluster.shared / "gates"
        self._volume = Volume(cluster)
        self._clocks = WallClocks(cluster.shared) if scenario.does(Deed.JUMP) else None
        self._words: dict[str, list[str]] = {}
        self._struck: list[Struck] = []
        self._ended = 0
        self._paused: list[str] = []
        self._cut: list[str] = []
        self._unplugged: list[str] = []
        self._dead_members: list[str] = []

    def perform(self) -> Evidence:
        """Raises WentWrong."""
        for folder in (self._gates, self._cluster.shared / "samples"):
            folder.mkdir()
            folder.chmod(0o777)
        self._members.start()
        self._where.begin()
        for command in self._scenario.commands:
            self._do(command)
        self._check_clocks()
        with self._where.readable() as run:
            return evidence(
                run,
                self._cluster.shared / "samples",
                self._struck,
                spoiled=self._volume.spoiled,
                ahead=set() if self._clocks is None else self._clocks.jumped,
            )

    def _do(self, command: Command) -> None:
        match command:
            case Start():
                for _ in range(command.nodes):
                    self._start(command)
            case Again():
                self._cluster.start_again(command.node, self._words[command.node], _ENV | self._where.env)
            case Shut():
                for gate in command.gates:
                    (self._gates / f"gate-{gate}").touch()
            case Open():
                (self._gates / f"go-{command.gate}").touch()
            case Stands():
                self._waits_for(
                    lambda: self._stands(command.gate), f"all ranks to stand before {command.gate}"
                )
            case Until():
                self._waits_for(lambda: self._happened(command), f"{command.event} {command.fields}")
            case Hold():
                time.sleep(command.seconds)
            case Strike():
                self._strike(command)
            case Harm():
                self._struck.append(self._now())
                self._volume.harm(command)
            case Storage():
                self._order(command)
            case Release():
                self._release()
            case End():
                self._end(command.codes)

    # Starting.

    def _start(self, start: Start) -> None:
        # The group begins when all nodes of the start are there, however late the last one comes.
        nodes = ("--max-nodes", str(start.nodes))
        asked = [
            *STANDING,
            *self._where.options,
            *nodes,
            *map(self._filled, (*self._scenario.options, *start.options)),
        ]
        words = [str(TINY), "--run-dir", self._where.url, *asked]
        node = f"n{len(self._cluster.nodes) + 1}"
        self._words[node] = words
        if self._clocks is None:
            self._cluster.start(words, _ENV | self._where.env)
        else:
            env = _ENV | self._where.env | self._clocks.env(node)
            self._cluster.start(words, env, is_cold=True)

    def _filled(self, option: str) -> str:
        """With addresses for the names in it."""
        option = option.replace("{n1}", self._cluster.address("n1"))
        return option.replace("{etcd}", self._members.endpoints)

    # Deeds.

    def _strike(self, strike: Strike) -> None:
        if strike.is_worker:
            self._strike_workers(strike)
            return
        names = list(strike.names) or self._nodes(strike.ranks)
        self._struck.append(self._now())
        match strike.deed:
            case Deed.KILL:
                self._cluster.machines.kill(*names)
                self._dead_members += [name for name in names if name in self._members.names]
            case Deed.TERMINATE:
                self._cluster.terminate(*names)
            case Deed.PAUSE:
                self._cluster.machines.pause(*names)
                self._paused += names
            case Deed.CUT | Deed.DEAFEN | Deed.MUTE:
                for name in names:
                    self._cluster.cut(name, *CUTS[strike.deed])
                self._cut += names
            case Deed.UNPLUG:
                for name in names:
                    self._cluster.machines.unplug(name)
                self._unplugged += names
            case Deed.JUMP:
                assert self._clocks is not None
                for name in names:
                    self._clocks.jump(name)
            case Deed.STARVE:
                raise AssertionError("only workers are starved")

    def _strike_workers(self, strike: Strike) -> None:
        workers = self._workers(strike.ranks)
        self._struck.append(self._now())
        for worker in workers:
            if strike.deed is Deed.STARVE:
                (self._gates / f"starve-rank{worker['rank']}").touch()
                (self._gates / f"starve-rank{worker['rank']}").chmod(0o666)
            else:
                self._cluster.kill_process(host(worker), int(worker["pid"]))

    def _order(self, storage: Storage) -> None:
        assert self._store is not None
        if storage is Storage.HEAL:
            # What struck nothing would prove nothing.
            self._waits_for(self._store.has_struck, "a request that the store's fault strikes")
        else:
            self._struck.append(self._now())
        self._store.order(storage)

    def _release(self) -> None:
        if self._paused:
            self._cluster.machines.unpause(*self._paused)
        for node in self._cut:
            self._cluster.heal(node)
        for node in self._unplugged:
            self._cluster.machines.plug(node)
        if self._dead_members:
            self._cluster.machines.revive(*self._dead_members)
        self._volume.mend()
        self._paused, self._cut, self._unplugged, self._dead_members = [], [], [], []

    def _end(self, codes: tuple[int, ...]) -> None:
        lives = self._cluster.lives[self._ended :]
        found = self._cluster.wait(lives)
        self._ended = len(self._cluster.lives)
        if sorted(found) != list(codes):
            told = {life.node: code for life, code in zip(lives, found, strict=True)}
            raise WentWrong(f"expected the exit codes {list(codes)}, found {told}")

    def _now(self) -> Struck:
        start = self._newest()
        return Struck(
            time=time.time(),
            step=self._where.step(),
            generation=0 if start is None else int(start["generation"]),
        )

    # Who is who.

    def _nodes(self, ranks: tuple[int, ...]) -> list[str]:
        if not ranks:
            return self._cluster.running()
        return list(dict.fromkeys(host(worker) for worker in self._workers(ranks)))

    def _workers(self, ranks: tuple[int, ...]) -> list[Record]:
        """Of the newest generation, in the order of `ranks`."""

        def told() -> list[Record] | None:
            start = self._newest()
            if start is None:
                return None
            there = self._events("worker_started", generation=start["generation"])
            by_rank = {event["rank"]: event for event in there}
            return [by_rank[rank] for rank in ranks] if by_rank.keys() >= set(ranks) else None

        return list(self._waits_for(told, f"workers of ranks {ranks}"))

    def _check_clocks(self) -> None:
        """Raises WentWrong: a clock that did not jump would prove nothing."""
        now = time.time()
        ahead = {host(event) for event in self._where.events() if event["time"] > now}
        jumped = set() if self._clocks is None else self._clocks.jumped
        if ahead != jumped:
            raise WentWrong(f"expected clocks ahead on {sorted(jumped)}, found them on {sorted(ahead)}")

    # What is waited for.

    def _stands(self, gate: str) -> bool:
        start = self._newest()
        if start is None or self._events("generation_ended", generation=start["generation"]):
            return False
        # A file of an older generation says nothing of this one.
        paths = [self._gates / f"at-{gate}-rank{rank}" for rank in range(start["world_size"])]
        return all(path.exists() and path.stat().st_mtime >= start["time"] for path in paths)

    def _happened(self, until: Until) -> bool:
        if not until.is_carried:
            return bool(self._events(until.event, **until.fields))
        assert self._store is not None
        return bool(_matching(self._store.carried_events(), until.event, until.fields))

    def _newest(self) -> Record | None:
        return next(reversed(self._events("generation_started")), None)

    def _events(self, name: str, **fields: Any) -> list[Record]:
        return _matching(self._where.events(), name, fields)

    def _waits_for(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value; an end of all nodes, or PATIENCE_S, ends the waiting."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := condition()):
            if not self._cluster.running() and not condition():
                raise WentWrong(f"expected {what}, but all nodes have ended")
            if time.monotonic() > deadline:
                raise WentWrong(f"expected {what} within {PATIENCE_S:.0f} s, found none")
            time.sleep(LOOK_S)
        return value


def _matching(events: list[Record], name: str, fields: dict[str, Any]) -> list[Record]:
    found = [event for event in events if event["event"] == name]
    return [event for event in found if all(field(event, key) == value for key, value in fields.items())]
