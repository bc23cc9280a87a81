"""Each step has one whole line in the metrics, whatever was killed, rewound or refused."""

import errno
import itertools
import json
import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import UsageError
from elastic.observe.log import EventLog
from elastic.observe.logged_event import RecipeEvent
from elastic.observe.metrics import Metrics, _cut, newest, read
from elastic.observe.step_line import StepLine
from elastic.testing.fakes import FakeClock
from elastic.train.state import resume
from elastic.train.state.restore import ResumePoint


def lines(steps):
    return b"".join(json.dumps({"step": step, "loss": 0.5}).encode() + b"\n" for step in steps)


def dumb_cut(data, step):
    """Keep the complete lines of steps up to `step`, reading every one of them."""
    records = map(json.loads, data.split(b"\n")[:-1])
    return [record["step"] for record in records if record["step"] <= step]


@given(st.integers(0, 30), st.integers(1, 10), st.integers(0, 45), st.integers(0, 40))
def test_rewind_keeps_what_reading_every_line_would_keep(first, count, step, torn_bytes):
    """The search starts at the end. The last line may be torn at any byte."""
    steps = list(range(first, first + count))
    content = lines(steps) + lines([first + count])[:-1][:torn_bytes]

    cut, rewound = _cut(content, step)

    assert dumb_cut(content[:cut], 10**9) == dumb_cut(content, step)
    assert rewound.highest == steps[-1]
    kept = dumb_cut(content, step)
    assert (rewound.last.step if rewound.last else None) == (kept[-1] if kept else None)
    assert [line.step for line in rewound.dropped] == [each for each in steps if each > step]
    assert cut == 0 or content[cut - 1 : cut] == b"\n"


def written(path, generation, resumed, steps):
    metrics = Metrics(path, generation=generation)
    rewound = metrics.rewind(resumed)
    for step in steps:
        metrics.append(StepLine(step=step))
    return rewound


def test_an_older_file_stays_until_a_newer_one_has_its_steps(tmp_path):
    """Generation 1 reached step 9, 2 and 3 fall back to step 4: after the second fault its file
    alone shows how far the run had come. Generation 4 brings the state of step 8.
    """
    path, found = tmp_path / "metrics.jsonl", []
    for generation, (resumed, reached) in enumerate([(0, 9), (4, 5), (5, 6), (8, 10), (10, 10), (10, 10)], 1):
        rewound = written(path, generation, resumed, range(resumed + 1, reached + 1))
        found.append((rewound.highest, rewound.ever, rewound.missing))
    assert found[:4] == [(0, 0, 0), (9, 9, 0), (5, 9, 0), (6, 9, 2)]
    names = [each.name for each in sorted(tmp_path.glob(".metrics-*"))]
    assert names == [".metrics-000005.jsonl", ".metrics-000006.jsonl"]


@pytest.mark.parametrize("there", [[8, 9], [8]])
def test_a_line_that_is_there_is_not_added_again(tmp_path, there):
    """The file lacks step 7, and has step 9 or not; a snapshot kept the line of step 9."""
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 0, [*range(1, 7), *there])
    point = ResumePoint(step=9, chain="", source="snapshot", line=StepLine(step=9))
    resume._rewind(Metrics(path, generation=2), point)
    assert [line.step for line in read(path)] == [*range(1, 7), 8, 9]


def test_the_newest_line_is_found_however_long_it_is(tmp_path):
    """A recipe logs a list of a million numbers. Without that line `status` showed step 0."""
    path = tmp_path / "metrics.jsonl"
    writer = Metrics(path, generation=1)
    for step in (1, 2):
        writer.append(StepLine(step=step, values={"histogram": [0.5] * 190_000}))
    writer.sync()
    assert path.stat().st_size > 1 << 20
    assert newest(path).step == 2
    path.write_bytes(b"x" * (1 << 20))
    assert newest(path) is None


class Disk:
    """Writes below `folder` take of `room_bytes`; the last one that finds some is cut short."""

    def __init__(self, folder, patch):
        self.room_bytes = 10**9
        self._folder = str(folder)
        self._write = os.write
        patch.setattr(os, "write", self.write)

    def write(self, fd, data):
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(self._folder):  # noqa: PTH115
            return self._write(fd, data)
        if not self.room_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        written_bytes = self._write(fd, data[: self.room_bytes])
        self.room_bytes -= written_bytes
        return written_bytes


OPERATIONS = st.lists(
    st.sampled_from(["step", "step", "room", 0, 30]) | st.tuples(st.integers(0, 3)), max_size=40
)


@given(OPERATIONS)
def test_on_a_full_disk_a_death_costs_waiting_lines_alone(operations):
    """A number: the disk has so many bytes left. A tuple: rank 0 dies, and the next one falls back
    by so many steps. `kept` has the steps whose lines did not wait when their writer died. Until
    there is room, lines of steps that are done again stay. A generation may bring back lines of
    older ones.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        disk, path, generations = Disk(folder, patch), Path(folder, "metrics.jsonl"), itertools.count(1)
        started = lambda: Metrics(path, generation=next(generations))  # noqa: E731
        writer, reached, kept, waiting = started(), 0, [], []
        writer.rewind(0)
        for each in [*operations, "room", "step"]:
            match each:
                case "step":
                    reached += 1
                    writer.append(StepLine(step=reached))
                    waiting.append(reached)
                    if not writer._file._waiting:
                        kept, waiting = kept + waiting, []
                case "room" | 0 | 30:
                    disk.room_bytes = 10**9 if each == "room" else each
                case (back,):
                    reached, waiting, writer = max(0, reached - back), [], started()
                    kept = [step for step in kept if step <= reached]
                    writer.rewind(reached)
            found = [line.step for line in read(path)]
            assert found == sorted(set(found)) and set(kept) <= set(found)
        assert {*kept} <= {*found} <= {*range(reached + 1)}
        assert found[-1] == reached and not writer._file._waiting
        writer.sync()
        assert path.read_bytes().count(b"\n") == len(found)


def test_a_loss_that_is_not_finite_is_null_for_every_json_reader(tmp_path):
    """And so is a number of an event of the recipe."""
    values = {"norms": [float("inf"), 1.0]}
    Metrics(tmp_path / "metrics", generation=1).append(StepLine(step=1, loss=float("nan"), values=values))
    log = EventLog(tmp_path / "events", node="n", clock=FakeClock())
    log.record(RecipeEvent(own_name="epoch_done", values=values))

    names = ".metrics-000001", "events"
    line, event = (msgspec.json.decode((tmp_path / name).read_bytes()) for name in names)
    assert (line["loss"], line["norms"], event["norms"]) == (None, [None, 1.0], [None, 1.0])


def test_a_step_that_logs_more_than_a_reader_takes_is_refused(tmp_path):
    """The step would be missing in every view, without a word."""
    metrics = Metrics(tmp_path / "metrics.jsonl", generation=1)
    metrics.append(StepLine(step=1, values={"table": [0.1] * 150_000}))
    with pytest.raises(UsageError, match="step 2"):
        metrics.append(StepLine(step=2, values={"table": [0.1] * 250_000}))
    metrics.append(StepLine(step=3))
    assert [line.step for line in read(tmp_path / "metrics.jsonl")] == [1, 3]
