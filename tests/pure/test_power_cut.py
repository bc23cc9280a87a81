"""The power may go off after any file operation: the run resumes, and loads nothing torn."""

import os
from pathlib import Path
from typing import Any

from payloads import bytes_of, commit_payload, payload_of
from power_cut import Recorder, cuts, last_tree, read_tree, write_tree
from records import IDENTITY

from elastic.checkpoint import stop_record
from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.newest_generation import newest_generation
from elastic.checkpoint.prune import RetentionPolicy, prune
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
        policy = RetentionPolicy(run_id=IDENTITY.run_id, keep=1)
        when = {"step": step, "generation": generation, "resumed_from": None}
        prune(self.checkpoints, policy, self.clock, is_newest=lambda: True, **when)

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
    without what was not synced: contents cut or empty, names lost all, one alone, or all but one.
    """
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    recorded.mkdir()
    with monkeypatch.context() as patch:
        recorder = Recorder(recorded, patch)
        live(recorded, recorder.mark)
    assert last_tree(recorder.changes) == read_tree(recorded), "an operation was not recorded"
    monkeypatch.setattr(os, "fsync", lambda _fd: None)  # of the many resumed runs
    number = 0
    for number, (tree, marks) in enumerate(cuts(recorder.changes)):
        folder = replayed / str(number)
        folder.mkdir(parents=True)
        write_tree(tree, folder)
        try:
            resumes(folder, marks)
        except BaseException as error:
            error.add_note(f"power cut {number}, after {marks}: {sorted(tree)}")
            raise
    assert number > 500
