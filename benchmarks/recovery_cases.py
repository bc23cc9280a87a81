"""Each case strikes a group that trains, and every figure runs from that moment to something that the group's own records or files show.

It does not promise that there is such an end: Stuck says what did not come. It knows of neither side but where ours keeps its run.
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
    """One figure of one try. `seconds` is None when it did not recover; `note` says what else was seen."""

    what: str
    seconds: float | None
    lost_steps: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`run` strikes a group of so many nodes and yields `rows`, in this order, some perhaps left out."""

    nodes: int
    run: Callable[[Group], Iterator[Measured]]
    rows: tuple[str, ...]


def kill_worker(group: Group) -> Iterator[Measured]:
    struck_s = group.strike()
    os.kill(group.worker_of_rank(group.chance.randrange(len(group.nodes))), signal.SIGKILL)
    yield _recovered(group, KILL_WORKER, struck_s)


def kill_node(group: Group) -> Iterator[Measured]:
    struck_s = group.strike()
    group.take_victim().kill()
    yield _recovered(group, KILL_NODE, struck_s)


def stop_one(group: Group) -> Iterator[Measured]:
    struck_s = group.strike()
    node = group.take_victim()
    node.process.terminate()
    yield _recovered(group, STOP_ONE, struck_s)
    group.ended([node])


def join(group: Group) -> Iterator[Measured]:
    group.strike()
    group.start_node()
    started_s = group.nodes[-1].started_s
    first = group.first_new(len(group.nodes))
    yield _until(first, group, JOIN, started_s)
    entered_s = _entered_s(group.folder, started_s)
    if entered_s is not None:
        yield _until(first, group, JOIN_ENTRY, entered_s)
    yield Measured(what=JOIN_PAUSE, seconds=group.pause_s(first))


def stop_all(group: Group) -> Iterator[Measured]:
    struck_s = group.strike()
    stopped, group.nodes = group.nodes, []
    for node in stopped:
        node.process.terminate()
    took_s = group.ended(stopped) - struck_s
    codes = ", ".join(str(node.process.returncode) for node in stopped)
    commit = group.folder / "run" / "checkpoints" / f"{group.high():012d}" / "COMMIT.json"
    saved = "last step committed" if commit.exists() else "last step not committed"
    yield Measured(what=STOP_ALL, seconds=took_s, note=f"exit codes {codes}, {saved}")
    for _ in stopped:
        group.start_node()
    yield _recovered(group, RESUME, group.nodes[0].started_s)


def _recovered(group: Group, what: str, since_s: float) -> Measured:
    return _until(group.first_new(), group, what, since_s)


def _until(first: Line, group: Group, what: str, since_s: float) -> Measured:
    return Measured(what=what, seconds=first.time - since_s, lost_steps=group.lost_steps())


def _entered_s(folder: Path, since_s: float) -> float | None:
    """When our rendezvous first had a node waiting after that moment; None where there is none of ours."""
    entries = []
    for path in (folder / "run" / "rendezvous").glob("state-*.json"):
        # Old states are removed at any time.
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
