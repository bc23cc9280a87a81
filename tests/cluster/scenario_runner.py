"""A scenario's commands run one after the other, and a wait that can no longer succeed fails at
once.

Commands wait for events, never for a fixed time except `hold`. The runner does not judge: it
returns the evidence. Each method `do_X` is the command X of scenario.py, with its words.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cluster import SCRATCH, SHARED, Cluster, Launch, WallClocks
from etcd_servers import etcd_program
from machines import ROOT
from oracle import Evidence, Injection, Record, evidence, field, host, jump_of, on_this_clock, read_lines
from pods import PodCluster
from run_storage import ObjectStore, RunStorage, SharedFolder
from scenario import Scenario
from volume import Volume

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
CUTS = {"cut": ("INPUT", "OUTPUT"), "deafen": ("INPUT",), "mute": ("OUTPUT",)}


class ScenarioFailed(Exception):  # noqa: N818 - the text says what failed
    """A scenario could not be carried out as written."""


class ScenarioRunner:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, cluster: Cluster) -> None:
        self._scenario = scenario
        self._cluster = cluster
        self._members = [f"e{place}" for place in range(1, scenario.settings.get("etcd", 0) + 1)]
        self._store = ObjectStore(cluster) if "store" in scenario.settings else None
        self._storage: RunStorage = self._store or SharedFolder(cluster)
        self._gates = cluster.shared / "gates"
        self._clocks = WallClocks(cluster.shared) if scenario.has_jumps else None
        self._words: dict[str, list[str]] = {}
        self._injections: list[Injection] = []
        self._ended: list[Launch] = []
        self._releases: list[Callable[[], object]] = []  # what ends the faults that last
        self._volume: Volume | None = None

    def run(self) -> Evidence:
        """Raises ScenarioFailed if the scenario cannot be carried out to its end."""
        scenario, cluster = self._scenario, self._cluster
        for folder in (self._gates, cluster.shared / "samples"):
            folder.mkdir()
            folder.chmod(0o777)
        if self._store is None:
            sizes = scenario.settings
            self._volume = Volume(cluster, volume_mib=sizes.get("volume"), disk_mib=sizes.get("disk"))
        cluster.make(scenario.nodes)
        if self._members:
            self._start_etcd()
        for name, words in scenario.commands:
            getattr(self, f"do_{name}")(**words)
        self._check_clocks()
        damaged = self._volume.damaged_steps if self._volume is not None else ()
        with self._storage.readable() as run:
            return evidence(run, cluster.shared / "samples", self._injections, damaged_steps=damaged)

    # Starting.

    def do_start(self, nodes: str, options: str) -> None:
        # With --max-nodes equal to their number, the group starts when all nodes of this line are
        # there.
        filled = {
            "{n1}": str(self._cluster.address("n1")),
            "{etcd}": ",".join(f"{self._cluster.address(name)}:2379" for name in self._members),
        }
        asked = [*self._storage.options, "--max-nodes", nodes, *self._scenario.options, *options.split()]
        for key, value in filled.items():
            asked = [word.replace(key, value) for word in asked]
        for _ in range(int(nodes)):
            node = f"n{len(self._cluster.nodes) + 1}"
            self._words[node] = [str(TINY), "--run-dir", self._storage.url, *STANDING, *asked]
            self._begin(self._cluster.start, node)

    def do_again(self, node: str, elsewhere: str) -> None:
        if elsewhere:
            assert isinstance(self._cluster, PodCluster)
            self._cluster.move(node)
        self._begin(self._cluster.start_again, node)

    def _begin(self, start: Callable[..., None], node: str) -> None:
        clock = {} if self._clocks is None else self._clocks.env(node)
        env = _ENV | self._storage.env | clock
        start(node, self._words[node], env, is_cold=self._clocks is not None)

    def _start_etcd(self) -> None:
        program = etcd_program()
        at = {name: f"http://{self._cluster.address(name)}" for name in self._members}
        services = {
            name: [
                *(str(program), "--name", name, "--data-dir", f"{SCRATCH}/etcd"),
                # Kept when the case fails. Only this logger writes to a file; etcd 3.4 has
                # another one by default.
                *("--logger", "zap", "--log-outputs", f"{SCRATCH}/etcd.log"),
                *("--listen-client-urls", f"{url}:2379", "--advertise-client-urls", f"{url}:2379"),
                *("--listen-peer-urls", f"{url}:2380", "--initial-advertise-peer-urls", f"{url}:2380"),
                *("--initial-cluster", ",".join(f"{name}={url}:2380" for name, url in at.items())),
            ]
            for name, url in at.items()
        }
        self._cluster.serve(services, programs=(program,))

    # Gates and waits.

    def do_shut(self, gates: str) -> None:
        for gate in gates.split():
            (self._gates / f"gate-{gate}").touch()

    def do_open(self, gate: str) -> None:
        (self._gates / f"go-{gate}").touch()

    def do_stands(self, gate: str) -> None:
        self._wait_for(lambda: self._stands(gate), f"all ranks to stand before {gate}")

    def _stands(self, gate: str) -> bool:
        start = self._newest()
        if start is None or self._events("generation_ended", generation=start["generation"]):
            return False
        # A file that an older generation wrote does not count.
        paths = [self._gates / f"at-{gate}-rank{rank}" for rank in range(start["world_size"])]
        return all(path.exists() and path.stat().st_mtime >= start["time"] for path in paths)

    def do_until(self, event: str, fields: str) -> None:
        self._wait_for(lambda: self._events(event, **_values(fields)), f"{event} {fields}")

    def do_uploaded(self, event: str, fields: str) -> None:
        store, wanted = self._of_store(), _values(fields)
        self._wait_for(lambda: _matching(store.uploaded_events(), event, wanted), f"{event} {fields}")

    def do_known(self, step: str) -> None:
        store = self._of_store()
        self._wait_for(lambda: store.committed_step() >= int(step), f"the group to know step {step}")

    def do_says(self, node: str, text: str) -> None:
        self._wait_for(lambda: text in self._cluster.printed(node), f"{node} to say {text!r}")

    def do_hold(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def do_probe(self, node: str) -> None:
        assert isinstance(self._cluster, PodCluster)
        self._cluster.execute(node, "status", self._storage.url)

    def do_ends(self, node: str, code: str) -> None:
        launch = self._cluster.newest_launch(node)
        (found,) = self._cluster.wait([launch])
        self._ended.append(launch)
        if found != int(code):
            printed = self._cluster.printed(node)[-2000:]
            raise ScenarioFailed(f"expected {node} to end with {code}, found {found}: {printed}")

    def do_end(self, codes: str) -> None:
        launches = [each for each in self._cluster.launches if each not in self._ended]
        found = self._cluster.wait(launches)
        self._ended += launches
        if sorted(found) != sorted(map(int, codes.split())):
            by_node = {launch.node: code for launch, code in zip(launches, found, strict=True)}
            raise ScenarioFailed(f"expected the exit codes {codes}, found {by_node}")

    # Faults.

    def do_hit_nodes(self, fault: str, names: str, ranks: str) -> None:
        cluster, machines = self._cluster, self._cluster.machines
        hit = names.split() or (self._nodes(ranks) if ranks else cluster.running())
        self._note_fault()
        match fault:
            case "kill":
                machines.kill(*hit)
                members = [name for name in hit if name in self._members]
                self._releases += [partial(machines.revive, *members)] if members else []
            case "terminate":
                cluster.terminate(*hit)
            case "pause":
                machines.pause(*hit)
                self._releases.append(partial(machines.unpause, *hit))
            case "cut" | "deafen" | "mute":
                for name in hit:
                    cluster.cut(name, *CUTS[fault])
                self._releases += [partial(cluster.heal, name) for name in hit]
            case "unplug":
                for name in hit:
                    machines.unplug(name)
                self._releases += [partial(machines.plug, name) for name in hit]
            case _:  # jump, jump-back
                assert self._clocks is not None
                for name in hit:
                    self._clocks.jump(name, fault)

    def do_hit_workers(self, fault: str, ranks: str) -> None:
        workers = self._workers(ranks)
        self._note_fault()
        for rank, worker in zip(ranks.split(), workers, strict=True):
            if fault == "starve":
                asked = self._gates / f"starve-rank{worker['rank']}"
                asked.touch()
                asked.chmod(0o666)
            else:
                self._wait_for(partial(self._kills, rank), f"a worker of rank {rank}")

    def _kills(self, rank: str) -> bool:
        """Kill this rank's worker; False if it has ended, and the next generation is to come."""
        (worker,) = self._workers(rank)
        try:
            self._cluster.kill_process(host(worker), int(worker["pid"]))
        except RuntimeError:
            return False
        return True

    def do_damage(self, fault: str) -> None:
        self._note_fault()
        self._of_folder().damage(fault)

    def do_cut_power(self) -> None:
        """`again` finds what the disk has then."""
        self._note_fault()
        self._cluster.machines.kill(*self._cluster.running())
        self._of_folder().cut_power()

    def do_order(self, how: str) -> None:
        store = self._of_store()
        if how == "heals":
            # A fault that affects no request proves nothing.
            self._wait_for(store.was_hit, "a request that the store's fault affects")
        else:
            self._note_fault()
        store.order(how)

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
        assert self._store is not None
        return self._store

    def _of_folder(self) -> Volume:
        assert self._volume is not None
        return self._volume

    # Nodes and workers.

    def _nodes(self, ranks: str) -> list[str]:
        return list(dict.fromkeys(host(worker) for worker in self._workers(ranks)))

    def _workers(self, ranks: str) -> list[Record]:
        """The `worker_started` events of these ranks of the newest generation, in their order."""

        def workers_of_ranks() -> list[Record] | None:
            start = self._newest()
            if start is None:
                return None
            there = self._events("worker_started", generation=start["generation"])
            by_rank = {event["rank"]: event for event in there}
            wanted = [rank if rank >= 0 else start["world_size"] + rank for rank in map(int, ranks.split())]
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


def _values(fields: str) -> dict[str, int | str]:
    pairs = (pair.split("=", maxsplit=1) for pair in fields.split())
    return {key: int(value) if value.isdecimal() else value for key, value in pairs}


def _matching(events: list[Record], name: str, fields: dict[str, Any]) -> list[Record]:
    found = [event for event in events if event["event"] == name]
    return [event for event in found if all(field(event, key) == value for key, value in fields.items())]
