"""TensorBoard's own reader finds each step once, whatever the run and the disk did."""

import errno
import math
from unittest.mock import Mock

import pytest
from logged import record
from watched import agent, shown

from elastic.config.run_dir import RunDir
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.report import tensorboard
from elastic.report.monitors import RankZeroReader
from elastic.report.tensorboard import LARGEST_FLOAT32, RETRY_S, TensorBoard, scalars_of
from elastic.testing.fakes import FakeClock


class Run:
    """A run directory that a test writes, one generation after another."""

    def __init__(self, folder):
        self.dir = RunDir.parse(str(folder / "run"))
        self.board = folder / "run-1"
        self.generation = self.step = 0
        self.told = []

    def begin(self, step, node="a"):
        """A generation goes on from this step."""
        self.generation += 1
        cause = "start" if self.generation == 1 else "failure"
        record(self.dir, "generation_started", self.generation, self.time, node, cause=cause)
        self.metrics = Metrics(self.dir.metrics, generation=self.generation)
        self.metrics.rewind(step)
        self.step = step

    def train(self, steps):
        for _ in range(steps):
            self.step += 1
            values = {"by": self.generation, "beyond float32": 1e100 * self.step}
            when = {"step": self.step, "generation": self.generation, "time": self.time}
            self.metrics.append(StepLine(loss=0.5, seconds=0.25, values=values, **when))

    @property
    def time(self):
        return 100.0 * self.generation + self.step

    def look(self, node="a"):
        """Of an agent; returns a function that looks at the run's files."""
        board = TensorBoard(self.board.parent, FakeClock())
        parts = agent(self.dir, node=node, print_line=self.told.append)
        reader = RankZeroReader(parts, with_values=True)
        return lambda: board.look(reader)

    @property
    def steps(self):
        return [step for step, _ in shown(self.board)["loss"]]

    @property
    def generations(self):
        """Which of them each shown step is of."""
        return [int(value) for _, value in shown(self.board)["by"]]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_another_agent_goes_on_where_the_files_end(run):
    """It finds that steps behind that were done again meanwhile."""
    run.begin(0)
    run.train(5)
    first = run.look()
    first()
    run.begin(3, node="b")
    run.train(4)
    record(run.dir, "rehearsed", run.generation, run.time, "b")
    first()  # it was cut off, and sees that another agent has rank 0

    run.look("b")()

    assert run.steps == [1, 2, 3, 4, 5, 6, 7]
    assert run.generations == [1, 1, 1, 2, 2, 2, 2]
    found = shown(run.board)
    assert (found["elastic/rehearsals"][-1], found["elastic/overlaps"][-1]) == ((7, 1.0), (7, 0.0))
    names = sorted(path.name for path in run.board.glob("events*"))
    assert [name.rpartition(".")[2] for name in names] == ["a", "b"]


def test_a_full_disk_is_told_once_and_costs_no_step(run, monkeypatch):
    run.begin(0)
    run.train(3)
    look = run.look()
    look()
    run.train(3)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(tensorboard.RecordWriter, "flush", Mock(side_effect=full))
        assert [look(), look()] == [RETRY_S, RETRY_S]
    run.train(1)
    look()

    assert len(run.told) == 1
    assert "nothing is written for TensorBoard ([Errno 28] No space left on device)" in run.told[0]
    assert run.steps == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("damage", [b"{", None])
def test_files_are_written_again_where_their_end_is_unknown(run, damage):
    run.begin(0)
    run.train(3)
    run.look()()
    (written := run.board / tensorboard.WRITTEN).unlink()
    if damage:
        written.write_bytes(damage)
    run.look()()
    assert run.steps == [1, 2, 3]


def test_numbers_of_a_step_are_shown_and_nothing_else():
    values = {"rate": 0.5, "good": True, "none": None, "huge": 10**400, "large": -1e300, "half": 1e38}
    values |= {"text": "t", "list": [1.0], "by": {"class": {"0": 1, "1": "x"}}}
    found = dict(scalars_of(StepLine(step=1, loss=None, world_size=3, seconds=0.5, values=values)))
    assert {tag for tag, value in found.items() if math.isnan(value)} == {"loss", "none"}
    large = {"huge": LARGEST_FLOAT32, "large": -LARGEST_FLOAT32, "half": 1e38}
    others = {"elastic/step_seconds": 0.5, "elastic/world_size": 3.0, "rate": 0.5, "good": 1.0}
    assert {tag: value for tag, value in found.items() if not math.isnan(value)} == others | large
