"""A scenario's commands run one after the other, and a wait that can no longer succeed fails at
once.

Commands wait for events, never for a fixed time except `hold`. The runner does not judge: it
returns the evidence. Each method `do_X` is a command whose first word is X, with its other words.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gates
import run_records
from cluster import COMMAND, SCRATCH, SHARED, Cluster, Launch, WallClocks, give
from etcd_servers import etcd_program
from machines import ROOT
from oracle import SAVES, Evidence, Injection, Record, evidence, host, jump_of, on_this_clock, read_lines
from run_storage import ObjectStore, SharedFolder
from scenario import Scenario
from volume import Volume

TINY = ROOT / "tests" / "process" / "recipes" / "tiny.py"
# Every node keeps every step in memory, and the first generation waits for all of the first nodes.
STANDING = (*SAVES, "--snapshot-every", "1", "--last-call", "10min")
_ENV = {
    "TINY_GATES": f"{SHARED}/gates",
    "TINY_SAMPLES": f"{SHARED}/samples",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/",  # which cannot be written to
    "TMPDIR": SCRATCH,
}
# Its state is cut over the workers, and must come out as that of one worker which is not sharded.
SHARDED = ("--", "--sharded") if os.environ.get("SHARDED") == "on" else ()
CUTS = {"cut": ("INPUT", "OUTPUT"), "deafen": ("INPUT",), "mute": ("OUTPUT",)}


class ScenarioFailed(Exception):  # noqa: N818 - the text says what failed
    """A scenario could not be carried out as written."""


class ScenarioRunner(gates.Gates):
    """One run of one scenario. `_releases`: what ends the faults that last."""

    def __init__(self, scenario: Scenario, cluster: Cluster) -> None:
        settings = scenario.settings
        self._scenario, self._cluster = scenario, cluster
        self._members = [f"e{place}" for place in range(1, settings.get("etcd", 0) + 1)]
        self._storage = ObjectStore(cluster) if "store" in settings else SharedFolder(cluster)
        self._volume = None if "store" in settings else Volume(cluster, settings)
        self.gates, self._samples = cluster.shared / "gates", cluster.shared / "samples"
        for folder in (self.gates, self._samples):
            give(folder)
        has_jumps = any(words[0].startswith("jump") for words in scenario.commands)
        self._clocks = WallClocks(cluster.shared) if has_jumps else None
        self._words: dict[str, list[str]] = {}
        self._injections: list[Injection] = []
        self._ended: list[Launch] = []
        self._releases: list[Callable[[], object]] = []

    def run(self) -> Evidence:
        """Raises ScenarioFailed or TimeoutError if it cannot be carried out to its end."""
        self._start_etcd()
        for verb, *words in self._scenario.commands:
            getattr(self, f"do_{verb}", partial(self._fault, verb))(*words)
        self._check_clocks()
        damaged = () if self._volume is None else self._volume.damaged_steps
        with self._storage.readable() as run:
            return evidence(run, self._samples, self._injections, damaged_steps=damaged)

    # Starting.

    def do_start(self, nodes: str, *options: str) -> None:
        # With --max-nodes equal to their number, the group starts when all nodes of this line are
        # there.
        filled = {
            "{n1}": str(self._cluster.address("n1")),
            "{etcd}": ",".join(f"{self._cluster.address(name)}:2379" for name in self._members),
        }
        standby = ("--standby", os.environ.get("STANDBY") or "auto")
        asked = (*self._storage.options, *standby, "--max-nodes", nodes, *self._scenario.options, *options)
        for _ in range(int(nodes)):
            node = f"n{len(self._cluster.nodes) + 1}"
            whole = [str(TINY), "--run-dir", self._storage.url, *STANDING, *asked, *SHARDED]
            self._words[node] = [filled.get(word, word) for word in whole]
            self._cluster.start(node, self._words[node], self._env(node))

    def do_again(self, node: str, *elsewhere: str) -> None:
        self._cluster.again(node, self._words[node], self._env(node), elsewhere=bool(elsewhere))

    def _env(self, node: str) -> dict[str, str]:
        return _ENV | self._storage.env | ({} if self._clocks is None else self._clocks.env(node))

    def _start_etcd(self) -> None:
        etcd = etcd_program()
        program = ("--volume", f"{etcd}:{etcd}:ro")
        at = {name: f"http://{self._cluster.address(name)}" for name in self._members}
        cluster = ",".join(f"{name}={url}:2380" for name, url in at.items())
        for name, url in at.items():
            words = (
                *(str(etcd), "--name", name, "--data-dir", f"{SCRATCH}/etcd"),
                *("--listen-client-urls", f"{url}:2379", "--advertise-client-urls", f"{url}:2379"),
                *("--listen-peer-urls", f"{url}:2380", "--initial-advertise-peer-urls", f"{url}:2380"),
                *("--initial-cluster", cluster),
            )
            self._cluster.make(name, words, self._cluster.node_files / f"{name}.log", {}, *program)

    # Gates and waits.

    do_shut = gates.Gates.shut
    do_open = gates.Gates.open

    def do_stands(self, gate: str) -> None:
        self._wait_for(lambda: self._stands(gate), f"all ranks to stand before {gate}")

    def _stands(self, gate: str) -> bool:
        start = self._newest()
        if start is None or self._events("generation_ended", generation=start["generation"]):
            return False
        return self.stand(gate, start["world_size"], since=start["time"])

    def do_until(self, event: str, *fields: str) -> None:
        self._wait_for(lambda: self._events(event, **_values(fields)), f"{event} {fields}")

    def do_uploaded(self, event: str, *fields: str) -> None:
        there = self._of_store().uploaded_events
        self._wait_for(lambda: run_records.matching(there(), event, **_values(fields)), event)

    def do_says(self, node: str, *words: str) -> None:
        text = " ".join(words)
        self._wait_for(lambda: text in self._cluster.printed(node), f"{node} to say {text!r}")

    def do_hold(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def do_probe(self, node: str) -> None:
        self._cluster.machines.execute(node, *COMMAND, "status", self._storage.url)

    def do_ends(self, node: str, code: str) -> None:
        self._end([self._cluster.newest_launch(node)], code)

    def do_end(self, *codes: str) -> None:
        self._end([each for each in self._cluster.launches if each not in self._ended], *codes)

    def _end(self, launches: Sequence[Launch], *codes: str) -> None:
        found = self._cluster.wait(*launches)
        self._ended += launches
        if sorted(found) != sorted(map(int, codes)):
            ends = [
                f"{launch.node} with {code}: {self._cluster.printed(launch.node)[-900:]}"
                for launch, code in zip(launches, found, strict=True)
            ]
            raise ScenarioFailed(f"expected the exit codes {codes}, found {ends}")

    # Faults: what has no method above.

    def _fault(self, verb: str, *words: str) -> None:
        cluster, machines = self._cluster, self._cluster.machines
        ranks = [int(word) for word in words if word.removeprefix("-").isdecimal()]
        workers = self._workers(ranks)
        hit = [word for word in words if word[0] in "en" and word[1:].isdecimal()] or [
            host(worker) for worker in workers
        ]
        hit = list(dict.fromkeys(hit)) or cluster.running()
        self._note_fault()
        match verb:
            case "kill" if words[0].startswith("worker"):
                for rank in ranks:
                    self._wait_for(partial(self._kills, rank), f"a worker of rank {rank}")
            case "starve":
                for worker in workers:
                    asked = self.gates / f"starve-rank{worker['rank']}"
                    asked.touch()
                    asked.chmod(0o666)
            case "kill":
                machines.kill(*hit)
                self._releases += [partial(machines.revive, name) for name in hit if name in self._members]
            case "terminate":
                machines.terminate(*hit)
            case "pause":
                machines.send(signal.SIGSTOP, *hit)
                self._releases.append(partial(machines.send, signal.SIGCONT, *hit))
            case "cut" if words == ("power",):  # `again` finds what the disk has then
                machines.kill(*hit)
                self._of_folder().cut_power()
            case "cut" | "deafen" | "mute":
                for name in hit:
                    cluster.cut(name, *CUTS[verb])
                self._releases += [partial(cluster.heal, name) for name in hit]
            case "unplug":
                for name in hit:
                    machines.unplug(name)
                self._releases += [partial(machines.plug, name) for name in hit]
            case "jump" | "jump-back":
                assert self._clocks is not None
                for name in hit:
                    self._clocks.jump(name, verb)
            case _:
                self._of_folder().damage(verb)

    def _kills(self, rank: int) -> bool:
        """Kill this rank's worker; False if it has ended, and the next generation is to come."""
        (worker,) = self._workers([rank])
        try:
            self._cluster.machines.inside(host(worker), "pid", "sh", "-c", f"kill -KILL {worker['pid']}")
        except RuntimeError:
            return False
        return True

    def do_storage(self, *words: str) -> None:
        store = self._of_store()
        if words == ("heals",):
            # A fault that affects no request proves nothing.
            self._wait_for(store.was_hit, "a request that the store's fault affects")
            store.heal()
        else:
            self._note_fault()
            store.fail(" ".join(words))

    def do_release(self) -> None:
        for release in self._releases:
            release()
        self._releases = []
        if self._volume is not None:
            self._volume.mend()

    def _note_fault(self) -> None:
        start = self._newest()
        generation = 0 if start is None else int(start["generation"])
        self._injections.append(Injection(time=time.time(), step=self._storage.step(), generation=generation))

    def _of_store(self) -> ObjectStore:
        assert isinstance(self._storage, ObjectStore)
        return self._storage

    def _of_folder(self) -> Volume:
        assert self._volume is not None
        return self._volume

    # What happened.

    def _workers(self, ranks: Sequence[int]) -> list[Record]:
        """The `worker_started` events of these ranks of the newest generation, in their order."""

        def workers_of_ranks() -> list[Record]:
            start = self._newest()
            if start is None:
                return []
            there = self._events("worker_started", generation=start["generation"])
            by_rank = {event["rank"]: event for event in there}
            wanted = [rank if rank >= 0 else start["world_size"] + rank for rank in ranks]
            return [by_rank[rank] for rank in wanted] if by_rank.keys() >= set(wanted) else []

        found = self._wait_for(workers_of_ranks, f"workers of ranks {ranks}") if ranks else []
        return list(found)

    def _check_clocks(self) -> None:
        """Raises ScenarioFailed if a clock did not jump: then the scenario proves nothing.

        The recipe writes its wall clock in each step.
        """
        now, expected = time.time(), set() if self._clocks is None else self._clocks.jumps
        seen = {(host(step), jump_of(step["time"], now)) for step in read_lines(self._samples)}
        if expected - seen:
            raise ScenarioFailed(f"expected jumps of clocks {expected}, found {seen}")

    def _newest(self) -> Record | None:
        return next(reversed(self._events("generation_started")), None)

    def _events(self, name: str, **fields: Any) -> list[Record]:
        """`node` is the name of a machine."""
        there = [event | {"node": host(event)} for event in on_this_clock(self._storage.events())]
        return run_records.matching(there, name, **fields)

    def _wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Raises TimeoutError, also when all nodes have ended."""
        return gates.wait_for(condition, what, lambda: not self._cluster.running())


def _values(fields: Sequence[str]) -> dict[str, int | str]:
    pairs = (pair.split("=", maxsplit=1) for pair in fields)
    return {key: int(value) if value.isdecimal() else value for key, value in pairs}
