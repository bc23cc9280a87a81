"""The power may go off after any file operation: the run resumes, and loads nothing torn.

File operations are recorded, and each prefix of them becomes the files that a power cut leaves:
after ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). Of a file, only
what was synced survives for certain, and of a folder, only the names that were there at its last
sync; later changes of names may survive one without the other, in any order. A rename is one
change.

The recorder watches functions of `os` in this process. That it misses nothing is checked: all
changes together must give the files that are there.
"""

import io
import itertools
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from payloads import bytes_of, commit_payload, payload_of
from records import IDENTITY

from elastic.checkpoint import stop_record
from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.provenance import newest_generation
from elastic.checkpoint.prune import prune
from elastic.checkpoint.stop_record import StopRecord
from elastic.config import identity
from elastic.config.run_dir import RunDir
from elastic.errors import CheckpointDamaged
from elastic.events import FirstStep
from elastic.observe import metrics
from elastic.observe.log import EventLog, read_events
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.group import Node
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.rendezvous import Generation, Rendezvous
from elastic.rendezvous.transitions import FAILURE
from elastic.storage.local import LocalStore
from elastic.storage.store import create_or_read
from elastic.system.files import make_folders
from elastic.testing.fakes import FakeClock

ROOT = 0  # the number of the recorded folder; each file and folder has one

Names = tuple[tuple[int, str, int | None], ...]  # (folder, name, file or None) changed together
Change = tuple[Any, ...]  # its kind, and what `Disk.apply` takes for it
Tree = dict[str, bytes | None]  # path to content, None for a folder

WATCHED = (
    *("open", "write", "ftruncate", "truncate", "mkdir", "link", "rename", "replace"),
    *("unlink", "remove", "rmdir", "fsync"),
)


class Recorder:
    """`changes` of the files below a folder, which is empty at first: compared after each call."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.changes: list[Change] = []
        self._root = root
        self._count = itertools.count(ROOT)
        self._nodes = {root.stat().st_ino: next(self._count)}
        self._contents: dict[int, bytes] = {}
        self._names: dict[tuple[int, str], int] = {}
        for name in WATCHED:
            patch.setattr(os, name, self._watched(name, getattr(os, name)))
        patch.setattr(io, "open", self._watched("open", io.open))

    def mark(self, value: Any) -> None:
        self.changes.append(("mark", value))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            self._look()
            about = os.fstat(arguments[0]) if name == "fsync" else None
            if about is not None and about.st_dev == self._root.stat().st_dev:
                self.changes.append(("synced", self._nodes.get(about.st_ino)))
            return result

        return watched

    def _look(self) -> None:
        # The number of a file that is gone may be given to a new one.
        known, self._nodes = self._nodes, {self._root.stat().st_ino: ROOT}
        names: dict[tuple[int, str], int] = {}
        for folder, folders, files in os.walk(self._root):
            parent = self._nodes[Path(folder).stat().st_ino]
            for name in folders + files:
                path = Path(folder, name)
                inode = path.lstat().st_ino
                if inode not in self._nodes:
                    self._nodes[inode] = known.get(inode) or next(self._count)
                node = names[parent, name] = self._nodes[inode]
                if name in files:
                    with io.FileIO(path) as file:  # the one opening that is not watched
                        content = file.read()
                    if self._contents.get(node) != content:
                        self._contents[node] = content
                        self.changes.append(("content", node, content))
        gone = [(*place, None) for place in self._names.keys() - names.keys()]
        new = [(*place, node) for place, node in names.items() if self._names.get(place) != node]
        self._names = names
        if gone or new:
            self.changes.append(("names", (*gone, *new)))


class Disk:
    """What a prefix of the changes has made."""

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}
        self.synced = defaultdict[int, bytes](bytes)
        self.units: list[Names] = []
        self.pending: list[int] = []  # units that no sync has made durable
        self.marks: list[tuple[str, int]] = []

    def apply(self, change: Change) -> None:
        match change:
            case "content", node, content:  # from here on
                self.contents[node] = content
            case "names", unit:
                self.pending.append(len(self.units))
                self.units.append(unit)
            case "synced", node:  # a file or folder
                self.synced[node] = self.contents.get(node, b"")
                is_durable = [any(where == node for where, _, _ in unit) for unit in self.units]
                self.pending = [each for each in self.pending if not is_durable[each]]
            case "mark", told:
                self.marks.append(told)

    def tree(self, content: Callable[[int], bytes], lost: frozenset[int] = frozenset()) -> Tree:
        """Without the changes of names that were lost."""
        folders = defaultdict[int, dict[str, int]](dict)
        for unit in (unit for number, unit in enumerate(self.units) if number not in lost):
            for where, name, node in unit:
                folders[where].pop(name, None)
                if node is not None:
                    folders[where][name] = node

        def below(folder: int, prefix: str) -> Iterator[tuple[str, bytes | None]]:
            for name, node in folders[folder].items():
                yield prefix + name, content(node) if node in self.contents else None
                if node not in self.contents:
                    yield from below(node, f"{prefix}{name}/")

        return dict(below(ROOT, ""))

    def torn(self, node: int) -> bytes:
        """Half of what was appended since the last sync."""
        synced, now = self.synced[node], self.contents[node]
        if not now.startswith(synced):
            return synced
        return now[: len(synced) + (len(now) - len(synced)) // 2]

    def trees(self) -> Iterator[Tree]:
        """Every way in which the power may go off here, bounded: the changes of names that are not
        durable are lost all, none, or, of the newest two, all but one, or one alone.
        """
        pending, synced = frozenset(self.pending), self.synced.__getitem__
        for content in (self.contents.__getitem__, synced, self.torn):
            yield self.tree(content)
        newest = self.pending[-2:]
        for lost in (
            pending,
            *(frozenset({each}) for each in newest),
            *(pending - {each} for each in newest),
        ):
            yield self.tree(synced, lost)


def cuts(changes: list[Change]) -> Iterator[tuple[Tree, list[tuple[str, int]]]]:
    """(the files that a power cut leaves, the marks before it), each tree once, with the most."""
    disk, found = Disk(), {}
    for change in changes:
        disk.apply(change)
        for tree in disk.trees():
            found[frozenset(tree.items())] = tree, list(disk.marks)
    yield from found.values()


POLICY = GroupPolicy(min_nodes=1, max_nodes=1, last_call_s=0.0, timeout_s=600.0)
STOPPED_AT = 3
BEGINNING = b'{"samples": 3}'


class Agent:
    """What an agent, its rank 0 and its uploader do to the files of a run, in one process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.run = RunDir.parse(str(folder / "run"))
        self.clock = FakeClock()
        self.rendezvous = Rendezvous(
            DirectoryBackend(self.run.rendezvous),
            Node(id=f"{name}-1-00000000", address="h", nproc=1),
            POLICY,
            keep_alive_s=2.0,
            clock=self.clock,
            open_endpoint=lambda: "h:1",
            min_generation=newest_generation(self.run, FakeClock()),
        )
        self.rendezvous.reopen()
        self.store = LocalStore(self.run.local)
        self.checkpoints = LocalStore(self.run.local / "checkpoints")
        self.log = EventLog(self.run.events / f"{name}.jsonl", node=name, clock=self.clock)

    def join(self) -> Generation:
        for _ in range(1000):
            if (generation := self.rendezvous.poll_join()) is not None:
                return generation
            self.clock.sleep(2.5)  # more than --keep-alive
        raise AssertionError("no generation was formed")

    def claim(self) -> None:
        found = create_or_read(self.store, identity.NAME, IDENTITY.to_json(), self.clock)
        identity.check(identity.parse(found), IDENTITY, self.run.url)
        assert create_or_read(self.store, "settings.json", BEGINNING, self.clock) == BEGINNING

    def start_worker(self, generation: int) -> None:
        log = self.run.log(generation=generation, rank=0)
        make_folders(log.parent)
        log.touch(exist_ok=False)

    def rewound(self, step: int, generation: int) -> Metrics:
        found = Metrics(self.run.metrics, generation=generation)
        found.rewind(step)
        return found

    def train(self, lines: Metrics, step: int, generation: int) -> None:
        lines.append(StepLine(step=step, loss=0.5, generation=generation))
        self.log.record(FirstStep(step=step))

    def save(self, step: int, generation: int) -> None:
        about: dict[str, Any] = {"generation": generation, "run_id": IDENTITY.run_id, "clock": self.clock}
        commit_payload(self.checkpoints, image(step), step, **about)

    def prune(self, step: int, generation: int) -> None:
        when = {"step": step, "generation": generation, "resumed_from": None}
        prune(self.checkpoints, self.clock, run_id=IDENTITY.run_id, keep=1, is_newest=lambda: True, **when)

    def newest(self) -> int:
        """The step of the newest checkpoint that loads; 0 for none."""
        records, _ = list_commits(self.checkpoints, self.clock)
        for record in records:
            try:
                payload = bytes_of(self.checkpoints, record, self.clock)
            except CheckpointDamaged:
                continue
            assert bytes(payload) == image(record.step)
            return record.step
        return 0


def image(step: int) -> bytes:
    return payload_of(f"the weights after step {step}, ".encode() * 200)


def live(folder: Path, mark: Any) -> None:
    """Two generations of one agent: a rank 0 dies in step 2, and the recipe stops after step 3."""
    agent = Agent(folder, "first")
    for generation, first, last in ((1, 1, 2), (2, 2, STOPPED_AT)):
        assert agent.join().number == generation
        mark(("generation", generation))
        agent.start_worker(generation)
        agent.claim()
        lines = agent.rewound(first - 1, generation)
        for step in range(first, last + 1):
            agent.train(lines, step, generation)
            if step % 2 == 1:
                lines.sync()
                agent.save(step, generation)
                mark(("step", step))
                agent.prune(step, generation)
        agent.rendezvous.close(FAILURE, step=last, counts=True)
    found = StopRecord(run_id=IDENTITY.run_id, step=STOPPED_AT, steps=9, reason="enough")
    stop_record.create(agent.store, found, agent.clock)
    mark(("stop", STOPPED_AT))


def resumes(folder: Path, marks: list[tuple[str, int]]) -> None:
    """The next start finds all that was promised before the cut, and goes on from there."""
    promised = dict(marks)
    agent = Agent(folder, "second")
    stopped = stop_record.read(agent.store, IDENTITY.run_id, agent.clock)
    assert (0 if stopped is None else stopped.step) >= promised.get("stop", 0)
    generation = agent.join().number
    assert generation > promised.get("generation", 0)
    agent.start_worker(generation)
    agent.claim()
    step = agent.newest()
    assert step >= promised.get("step", 0)
    lines = agent.rewound(step, generation)
    assert [each.step for each in metrics.read(agent.run.metrics)] == list(range(1, step + 1))
    agent.train(lines, step + 1, generation)
    agent.save(step + 1, generation)
    agent.prune(step + 1, generation)
    assert agent.newest() == step + 1
    assert [each.step for each in metrics.read(agent.run.metrics)] == list(range(1, step + 2))
    assert read_events(agent.run.events)


def test_after_a_power_cut_at_any_operation_a_run_resumes(tmp_path, monkeypatch):
    """A short run is recorded. The files are those of each prefix of its operations, with and
    without what was not synced: contents cut or empty, names lost. They lie in memory, for speed.
    """
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    with monkeypatch.context() as patch:
        recorder = Recorder(recorded, patch)
        live(recorded, recorder.mark)
    disk = Disk()
    for change in recorder.changes:
        disk.apply(change)
    there = {path.relative_to(recorded): path for path in recorded.rglob("*")}
    assert disk.tree(disk.contents.__getitem__) == {
        str(name): None if path.is_dir() else path.read_bytes() for name, path in there.items()
    }, "an operation was not recorded"
    monkeypatch.setattr(os, "fsync", lambda _fd: None)  # of the many resumed runs
    number = 0
    for number, (tree, marks) in enumerate(cuts(recorder.changes)):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            for path, content in tree.items():
                where = Path(name, path)
                where.mkdir() if content is None else where.write_bytes(content)
            try:
                resumes(Path(name), marks)
            except BaseException as error:
                error.add_note(f"power cut {number}, after {marks}: {sorted(tree)}")
                raise
    assert number > 350
