"""Nothing outside of a run directory is read or written through it, no reader waits for ever, and
no file fills the memory.
"""

import os
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace

import pytest
from payloads import bytes_of, commit_payload, payload_of

from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.prune import prune
from elastic.checkpoint.record import step_dir
from elastic.errors import CheckpointDamaged, StoreFailed
from elastic.events import RunInterrupted
from elastic.observe import metrics
from elastic.observe.log import EventLog, read_events
from elastic.observe.step_line import StepLine
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.snapshot import safetensors_header
from elastic.storage.local import LocalStore
from elastic.storage.store import read_small
from elastic.testing.fakes import FakeClock

CLOCK = FakeClock()
HUGE_BYTES = 1 << 28
MOST_BYTES = 32 << 20
IMAGE, PRECIOUS = payload_of(b"image"), payload_of(b"precious")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def store(root):
    return LocalStore(root)


@pytest.fixture
def outside(tmp_path):
    """A folder that is none of the program's business."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_bytes(PRECIOUS)
    yield tmp_path / "outside"
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["precious"]
    assert (tmp_path / "outside" / "precious").read_bytes() == PRECIOUS


def save(store, step, *, run_id="r", data=IMAGE):
    return commit_payload(store, data, step, run_id=run_id, clock=CLOCK)


def refused(call, error):
    with pytest.raises(error):
        call()


@contextmanager
def little_memory():
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def sparse(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)


PLACES = {
    "a link outside": lambda path: path.symlink_to(path.parents[4] / "outside" / "precious"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a pipe, whose opening would wait for ever": os.mkfifo,
    "a folder": os.mkdir,
    "a large hole": sparse,
    "a longer file": lambda path: path.write_bytes(PRECIOUS + b"x"),
}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_what_lies_in_the_place_of_a_payload_is_damage(store, root, outside, make):
    """A link's target may have the right bytes."""
    record = save(store, 7, data=PRECIOUS).record
    (root / record.payload).unlink()
    make(root / record.payload)
    with little_memory():
        refused(lambda: bytes_of(store, record, CLOCK), CheckpointDamaged)


@pytest.mark.parametrize("make", [os.mkfifo, sparse])
def test_what_lies_in_the_place_of_a_record_is_damage(store, root, make):
    """A run of which all records were replaced must not be started over."""
    record = root / save(store, 7).record.name
    record.unlink()
    make(record)
    records, damages = list_commits(store, CLOCK)
    assert records == [] and [damage.step for damage in damages] == [7]


@pytest.mark.parametrize("size_bytes", [0, 10**6, 10**15])
def test_a_record_of_another_size_is_damage_and_takes_no_memory(store, size_bytes):
    """For the largest there is no room at all."""
    record = replace(save(store, 7).record, size_bytes=size_bytes)
    with pytest.raises(
        CheckpointDamaged, match=r"bytes, expected|no tensor's|more than this process can hold"
    ):
        bytes_of(store, record, CLOCK)


@pytest.mark.parametrize("target", ["outside", "nowhere", "itself"])
@pytest.mark.parametrize("name", [step_dir(9), f"{step_dir(9)}/a-000001-12345678"])
def test_a_link_among_the_checkpoints_is_refused(tmp_path, store, root, outside, name, target):
    """Its disk is not mounted, or it leads anywhere: an older step must not be loaded for it."""
    save(store, 7)
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).symlink_to(root / name if target == "itself" else tmp_path / target)
    with pytest.raises(StoreFailed, match="remove it"):
        list_commits(store, CLOCK)


def test_a_folder_of_checkpoints_may_be_reached_by_a_link(tmp_path, root):
    """A run directory on another disk; while that is not mounted, it holds not nothing."""
    (tmp_path / "link").symlink_to(root)
    through = LocalStore(tmp_path / "link")
    with pytest.raises(StoreFailed, match="is its disk mounted"):
        list_commits(through, CLOCK)
    root.mkdir()
    assert bytes_of(through, save(through, 7).record, CLOCK) == IMAGE


def test_records_of_another_run_never_count(store):
    """Checkpoints of a longer run were copied into the folder: none of them is used, none of ours
    is deleted in their favour, and a step that is taken is committed again beside it.
    """
    old, *theirs = [save(store, step, run_id="other", data=PRECIOUS).record for step in (0, 1, 3, 100, 200)]
    store.delete(old.payload)
    for step in (1, 2, 3):
        assert save(store, step).is_ours
        when = {"step": step, "generation": 2}
        prune(store, CLOCK, run_id="r", keep=2, **when, resumed_from=None, is_newest=lambda: True)
    records, damages = list_commits(store, CLOCK, run_id="r")
    assert [record.step for record in records] == [3, 2]
    assert bytes_of(store, records[0], CLOCK) == IMAGE
    assert {0, 1, 100, 200} <= {damage.step for damage in damages}
    assert all(bytes_of(store, each, CLOCK) == PRECIOUS for each in theirs)
    forged = replace(records[0], step=9)
    assert forged.payload.startswith(step_dir(9))
    with pytest.raises(CheckpointDamaged, match="missing"):
        bytes_of(store, forged, CLOCK)


@pytest.mark.parametrize("name", [".metrics-000001.jsonl", "n.jsonl"])
def test_nothing_is_appended_through_a_link(tmp_path, outside, name, capsys):
    """A link under the name of the metrics or of a log, to a file of the person's own."""
    path = tmp_path / "run" / name
    path.parent.mkdir()
    path.symlink_to(outside / "precious")
    if name != "n.jsonl":
        named = path.with_name("metrics.jsonl")
        metrics.Metrics(named, generation=1).append(StepLine(step=1))
        with pytest.raises(OSError, match="plain file"):
            metrics.Metrics(named, generation=2).rewind(0)
        assert metrics.newest(named) is None
    else:
        EventLog(path, node="n", clock=CLOCK).record(RunInterrupted(step=1))
    assert read_events(path.parent) == []
    assert "not written" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_no_file_holds_up_a_report_or_an_agent(tmp_path, printed, make):
    """A pipe without a writer, or a file without an end, under every name that is read."""
    (tmp_path / "beats").mkdir()
    for name in ("metrics.jsonl", "run.json", "state-000000000001.json", "beats/x"):
        make(tmp_path / name)
    backend = DirectoryBackend(tmp_path)
    refused(backend.read, BackendFailed)
    assert backend.shown() == {}
    assert read_events(tmp_path) == [] == metrics.read(tmp_path / "metrics.jsonl")
    assert metrics.newest(tmp_path / "metrics.jsonl") is None
    (tmp_path / "events").mkdir()
    assert "run.json" in printed(2, "report", tmp_path)


def test_files_larger_than_the_bound_take_little_memory(tmp_path):
    """Large holes where small files belong, and a header that announces exabytes."""
    sparse(tmp_path / "state-000000000001.json")
    sparse(tmp_path / "run.json")
    sparse(tmp_path / "events" / "n.jsonl")
    backend = DirectoryBackend(tmp_path)
    header = safetensors_header.LENGTH.pack(2**63) + b"{}"
    with little_memory():
        refused(backend.read, BackendFailed)
        assert len(read_small(LocalStore(tmp_path), "run.json", CLOCK)) < MOST_BYTES
        assert read_events(tmp_path / "events") == []
        refused(lambda: safetensors_header.parse(header), CheckpointDamaged)
