"""A scenario's commands run one after the other, and a wait that can no longer succeed fails at
once.

Commands wait for events, never for a fixed time except `hold`. The runner does not judge: it
returns the evidence.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cluster import SCRATCH, SHARED, Cluster, Launch
from etcd_members import EtcdMembers
from evidence import evidence, field, host, on_this_clock, read_lines
from image import ROOT
from oracle import Evidence, Injection, Record
from pods import PodCluster
from run_storage import ObjectStore, RunStorage, SharedFolder
from scenario import (
    CLOCK_ACTIONS,
    Action,
    Again,
    Command,
    CutPower,
    End,
    Ends,
    Hold,
    Inject,
    Open,
    Probe,
    Release,
    Says,
    Scenario,
    Shut,
    Stands,
    Start,
    StorageMode,
    Until,
    UntilKnown,
    VolumeFault,
)
from volume import Volume
from wall_clocks import WallClocks, jump_of

from elastic.config.interpreter import MALLOC

TINY = ROOT / "tests" / "process" / "recipes" / "tiny.py"
# Every node keeps every step in memory, and the first generation waits for all of the first nodes.
SAVES = ("--save-every", "4steps", "--keep", "99", "--rehearse", "off")
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
    # An agent without these settings would set them and execute itself once more.
    "GLIBC_TUNABLES": MALLOC,
    "PYTHONHASHSEED": "0",
}
WAIT_LIMIT_S = 240.0
POLL_S = 0.02
CUTS = {Action.CUT: ("INPUT", "OUTPUT"), Action.DEAFEN: ("INPUT",), Action.MUTE: ("OUTPUT",)}


class ScenarioFailed(Exception):  # noqa: N818 - the text says what failed
    """A scenario could not be carried out as written."""


class ScenarioRunner:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, cluster: Cluster) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._members = EtcdMembers(cluster, scenario.members)
        self._store = ObjectStore(cluster) if scenario.has_store else None
        self._storage: RunStorage = self._store or SharedFolder(cluster)
        self._gates = cluster.shared / "gates"
        self._volume = Volume(cluster)
        self._clocks = WallClocks(cluster.shared) if scenario.does(*CLOCK_ACTIONS) else None
        self._words: dict[str, list[str]] = {}
        self._injections: list[Injection] = []
        self._ended: list[Launch] = []
        self._paused: list[str] = []
        self._cut: list[str] = []
        self._unplugged: list[str] = []
        self._dead_members: list[str] = []

    def run(self) -> Evidence:
        """Raises ScenarioFailed if the scenario cannot be carried out to its end."""
        for folder in (self._gates, self._cluster.shared / "samples"):
            folder.mkdir()
            folder.chmod(0o777)
        self._members.start()
        self._storage.begin()
        for command in self._scenario.commands:
            self._do(command)
        self._check_clocks()
        with self._storage.readable() as run:
            return evidence(
                run,
                self._cluster.shared / "samples",
                self._injections,
                damaged_steps=self._volume.damaged_steps,
            )

    def _do(self, command: Command) -> None:
        match command:
            case Start():
                for _ in range(command.nodes):
                    self._start(command)
            case Again():
                self._again(command)
            case Probe():
                assert isinstance(self._cluster, PodCluster)
                self._cluster.execute(command.node, "status", self._storage.url)
            case Shut():
                for gate in command.gates:
                    (self._gates / f"gate-{gate}").touch()
            case Open():
                (self._gates / f"go-{command.gate}").touch()
            case Stands():
                self._wait_for(
                    lambda: self._stands(command.gate), f"all ranks to stand before {command.gate}"
                )
            case Until():
                self._wait_for(lambda: self._happened(command), f"{command.event} {command.fields}")
            case UntilKnown():
                self._wait_for(lambda: self._is_known(command), f"the group to know step {command.step}")
            case Says():
                self._wait_for(
                    lambda: command.text in self._cluster.printed(command.node),
                    f"{command.node} to say {command.text!r}",
                )
            case Hold():
                time.sleep(command.seconds)
            case Inject():
                self._inject(command)
            case VolumeFault():
                self._injections.append(self._now())
                self._volume.damage(command)
            case StorageMode():
                self._order(command)
            case CutPower():
                self._injections.append(self._now())
                self._cluster.cut_power()
            case Release():
                self._release()
            case Ends():
                self._ends(command)
            case End():
                self._end(command.codes)

    # Starting.

    def _start(self, start: Start) -> None:
        # With --max-nodes equal to their number, the group starts when all nodes of this line are
        # there.
        nodes = ("--max-nodes", str(start.nodes))
        asked = [
            *STANDING,
            *self._storage.options,
            *nodes,
            *map(self._filled, (*self._scenario.options, *start.options)),
        ]
        words = [str(TINY), "--run-dir", self._storage.url, *asked]
        node = f"n{len(self._cluster.nodes) + 1}"
        self._words[node] = words
        self._cluster.start(words, self._env(node), is_cold=self._clocks is not None)

    def _again(self, again: Again) -> None:
        words, env = self._words[again.node], self._env(again.node)
        if again.is_elsewhere:
            assert isinstance(self._cluster, PodCluster)
            self._cluster.start_elsewhere(again.node, words, env)
        else:
            self._cluster.start_again(again.node, words, env, is_cold=self._clocks is not None)

    def _env(self, node: str) -> dict[str, str]:
        clock = {} if self._clocks is None else self._clocks.env(node)
        return _ENV | self._storage.env | clock

    def _filled(self, option: str) -> str:
        """The option with addresses in place of {n1} and {etcd}."""
        option = option.replace("{n1}", self._cluster.address("n1"))
        return option.replace("{etcd}", self._members.endpoints)

    # Faults.

    def _inject(self, fault: Inject) -> None:
        if fault.is_worker:
            self._inject_into_workers(fault)
            return
        names = list(fault.names) or self._nodes(fault.ranks)
        self._injections.append(self._now())
        match fault.action:
            case Action.KILL:
                self._cluster.machines.kill(*names)
                self._dead_members += [name for name in names if name in self._members.names]
            case Action.TERMINATE:
                self._cluster.terminate(*names)
            case Action.PAUSE:
                self._cluster.machines.pause(*names)
                self._paused += names
            case Action.CUT | Action.DEAFEN | Action.MUTE:
                for name in names:
                    self._cluster.cut(name, *CUTS[fault.action])
                self._cut += names
            case Action.UNPLUG:
                for name in names:
                    self._cluster.machines.unplug(name)
                self._unplugged += names
            case Action.JUMP | Action.JUMP_BACK:
                assert self._clocks is not None
                for name in names:
                    self._clocks.jump(name, fault.action)
            case Action.STARVE:
                raise AssertionError("only workers can be starved")

    def _inject_into_workers(self, fault: Inject) -> None:
        workers = self._workers(fault.ranks)
        self._injections.append(self._now())
        for rank, worker in zip(fault.ranks, workers, strict=True):
            if fault.action is Action.STARVE:
                asked = self._gates / f"starve-rank{worker['rank']}"
                asked.touch()
                asked.chmod(0o666)
            else:
                self._wait_for(partial(self._kills, rank), f"a worker of rank {rank}")

    def _kills(self, rank: int) -> bool:
        """Kill this rank's worker; False if it has ended, and the next generation is to come."""
        (worker,) = self._workers((rank,))
        try:
            self._cluster.kill_process(host(worker), int(worker["pid"]))
        except (RuntimeError, ProcessLookupError):
            return False
        return True

    def _order(self, storage: StorageMode) -> None:
        assert self._store is not None
        if storage is StorageMode.HEAL:
            # A fault that affects no request proves nothing.
            self._wait_for(self._store.was_hit, "a request that the store's fault affects")
        else:
            self._injections.append(self._now())
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

    def _ends(self, one: Ends) -> None:
        launch = self._cluster.newest_launch(one.node)
        (code,) = self._cluster.wait([launch])
        self._ended.append(launch)
        if code != one.code:
            raise ScenarioFailed(
                f"expected {one.node} to end with {one.code}, found {code}: {self._cluster.printed(one.node)[-2000:]}"
            )

    def _end(self, codes: tuple[int, ...]) -> None:
        launches = [each for each in self._cluster.launches if each not in self._ended]
        found = self._cluster.wait(launches)
        self._ended += launches
        if sorted(found) != list(codes):
            by_node = {launch.node: code for launch, code in zip(launches, found, strict=True)}
            raise ScenarioFailed(f"expected the exit codes {list(codes)}, found {by_node}")

    def _now(self) -> Injection:
        start = self._newest()
        return Injection(
            time=time.time(),
            step=self._storage.step(),
            generation=0 if start is None else int(start["generation"]),
        )

    # Nodes and workers.

    def _nodes(self, ranks: tuple[int, ...]) -> list[str]:
        if not ranks:
            return self._cluster.running()
        return list(dict.fromkeys(host(worker) for worker in self._workers(ranks)))

    def _workers(self, ranks: tuple[int, ...]) -> list[Record]:
        """The `worker_started` events of these ranks of the newest generation, in the order of
        `ranks`.
        """

        def workers_of_ranks() -> list[Record] | None:
            start = self._newest()
            if start is None:
                return None
            there = self._events("worker_started", generation=start["generation"])
            by_rank = {event["rank"]: event for event in there}
            wanted = [rank if rank >= 0 else start["world_size"] + rank for rank in ranks]
            return [by_rank[rank] for rank in wanted] if by_rank.keys() >= set(wanted) else None

        return list(self._wait_for(workers_of_ranks, f"workers of ranks {ranks}"))

    def _check_clocks(self) -> None:
        """Raises ScenarioFailed if a clock did not jump: then the scenario proves nothing.

        The recipe writes its wall clock in each step. In a scenario without an expected history a
        node may die before its next step.
        """
        now, jumps = time.time(), {} if self._clocks is None else self._clocks.jumps
        steps = read_lines(self._cluster.shared / "samples") if self._scenario.expected else []
        seen = {(host(step), jump_of(step["time"], now)) for step in steps}
        expected = {(node, jump) for node, found in jumps.items() for jump in found}
        if steps and expected - seen:
            raise ScenarioFailed(f"expected jumps of clocks {expected}, found {seen}")

    # Waiting.

    def _stands(self, gate: str) -> bool:
        start = self._newest()
        if start is None or self._events("generation_ended", generation=start["generation"]):
            return False
        # A file that an older generation wrote does not count.
        paths = [self._gates / f"at-{gate}-rank{rank}" for rank in range(start["world_size"])]
        return all(path.exists() and path.stat().st_mtime >= start["time"] for path in paths)

    def _happened(self, until: Until) -> bool:
        if not until.is_uploaded:
            return bool(self._events(until.event, **until.fields))
        assert self._store is not None
        return bool(_matching(self._store.uploaded_events(), until.event, until.fields))

    def _is_known(self, until: UntilKnown) -> bool:
        assert self._store is not None
        return self._store.committed_step() >= until.step

    def _newest(self) -> Record | None:
        return next(reversed(self._events("generation_started")), None)

    def _events(self, name: str, **fields: Any) -> list[Record]:
        return _matching(on_this_clock(self._storage.events()), name, fields)

    def _wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value of `condition`.

        Raises ScenarioFailed when all nodes have ended, and after WAIT_LIMIT_S.
        """
        deadline = time.monotonic() + WAIT_LIMIT_S
        while not (value := condition()):
            if not self._cluster.running() and not condition():
                raise ScenarioFailed(f"expected {what}, but all nodes have ended")
            if time.monotonic() > deadline:
                raise ScenarioFailed(f"expected {what} within {WAIT_LIMIT_S:.0f} s, found none")
            time.sleep(POLL_S)
        return value


def _matching(events: list[Record], name: str, fields: dict[str, Any]) -> list[Record]:
    found = [event for event in events if event["event"] == name]
    return [event for event in found if all(field(event, key) == value for key, value in fields.items())]
