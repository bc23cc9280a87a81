"""A case hits a group that trains with a fault, and measures until the group's own records show an
end.

If that end does not come, NotRecovered says what was missing. The cases know nothing about
launchers, except where elastic-train keeps its run.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from recovery_group import Group, Line

KILL_WORKER, KILL_NODE, STOP_ONE = "worker SIGKILL", "node SIGKILL", "SIGTERM one of two"
JOIN, JOIN_ENTRY, JOIN_PAUSE = "join, from its start", "join, from its entry", "join, pause of the other"
STOP_ALL, RESUME = "SIGTERM all, to last exit", "same command again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One figure of one try.

    seconds: None if the group did not recover. note: further observations.
    """

    what: str
    seconds: float | None
    lost_steps: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """run: hits a group of so many nodes, and yields the figures of `rows`, in order; some may be
    missing.
    """

    nodes: int
    run: Callable[[Group], Iterator[Measured]]
    rows: tuple[str, ...]


def kill_worker(group: Group) -> Iterator[Measured]:
    fault_s = group.begin_fault()
    os.kill(group.worker_of_rank(group.rng.randrange(len(group.nodes))), signal.SIGKILL)
    yield _recovered(group, KILL_WORKER, fault_s)


def kill_node(group: Group) -> Iterator[Measured]:
    fault_s = group.begin_fault()
    group.take_victim().kill()
    yield _recovered(group, KILL_NODE, fault_s)


def stop_one(group: Group) -> Iterator[Measured]:
    fault_s = group.begin_fault()
    node = group.take_victim()
    node.process.terminate()
    yield _recovered(group, STOP_ONE, fault_s)
    group.ended([node])


def join(group: Group) -> Iterator[Measured]:
    group.begin_fault()
    group.start_node()
    started_s = group.nodes[-1].started_s
    first = group.first_new(len(group.nodes))
    yield _until(first, group, JOIN, started_s)
    entered_s = _entered_s(group.folder, started_s)
    if entered_s is not None:
        yield _until(first, group, JOIN_ENTRY, entered_s)
    yield Measured(what=JOIN_PAUSE, seconds=group.pause_s(first))


def stop_all(group: Group) -> Iterator[Measured]:
    fault_s = group.begin_fault()
    stopped, group.nodes = group.nodes, []
    for node in stopped:
        node.process.terminate()
    took_s = group.ended(stopped) - fault_s
    codes = ", ".join(str(node.process.returncode) for node in stopped)
    commits = group.folder.glob(f"run/checkpoints/{group.high():012d}/*/COMMIT.json")
    saved = "last step committed" if any(commits) else "last step not committed"
    yield Measured(what=STOP_ALL, seconds=took_s, note=f"exit codes {codes}, {saved}")
    for _ in stopped:
        group.start_node()
    yield _recovered(group, RESUME, group.nodes[0].started_s)


def _recovered(group: Group, what: str, since_s: float) -> Measured:
    return _until(group.first_new(), group, what, since_s)


def _until(first: Line, group: Group, what: str, since_s: float) -> Measured:
    return Measured(what=what, seconds=first.time - since_s, lost_steps=group.lost_steps())


def _entered_s(folder: Path, since_s: float) -> float | None:
    """When a node first waited in our rendezvous after that moment; None for another launcher."""
    entries = []
    for path in (folder / "run" / "rendezvous").glob("state-*.json"):
        # The agents remove old states at any time.
        with contextlib.suppress(FileNotFoundError):
            written_s = path.stat().st_mtime
            if json.loads(path.read_bytes())["waiting"] and written_s > since_s:
                entries.append(written_s)
    return min(entries, default=None)


CASES = {
    "worker-kill": Case(nodes=2, run=kill_worker, rows=(KILL_WORKER,)),
    "node-kill": Case(nodes=2, run=kill_node, rows=(KILL_NODE,)),
    "term-one": Case(nodes=2, run=stop_one, rows=(STOP_ONE,)),
    "join": Case(nodes=1, run=join, rows=(JOIN, JOIN_ENTRY, JOIN_PAUSE)),
    "term-all": Case(nodes=2, run=stop_all, rows=(STOP_ALL, RESUME)),
}
