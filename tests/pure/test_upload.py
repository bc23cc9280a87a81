"""Events, metrics and logs of all nodes are found again at the run's URL, whichever node died."""

import contextlib
import os
import queue

import pytest
import run_records
from faulty_storage import Deed
from gates import wait_for

from elastic.config.run_dir import RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.events import Restored
from elastic.observe import log_shipper as shipper
from elastic.observe import metrics
from elastic.observe.log import EventLog
from elastic.observe.log_shipper import LogShipper, upload_left_behind
from elastic.observe.metrics import Metrics
from elastic.observe.step_line import StepLine
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.report.views import heartbeat_ages_s, readable
from elastic.storage.remote import Objects
from elastic.system.clock import SystemClock, file_time_s


@pytest.fixture
def node(s3_bucket, tmp_path):
    """A machine of its own: the run's URL and a local folder."""
    return lambda name: RunDir(url=f"{s3_bucket}/run", local=tmp_path / name)


def trained(run, name, generation, first, last):
    """What the workers of one generation leave in their node's folder."""
    kept = Metrics(run.metrics_of(name), generation=generation, is_copy=True)
    kept.rewind(first - 1)
    for step in range(first, last + 1):
        kept.append(StepLine(step=step, generation=generation))


def restored(run, name, generation, step, lost_steps=0):
    log = EventLog(run.events / f"{name}-worker0.jsonl", node=name, clock=SystemClock())
    log.generation = generation
    log.record(Restored(step=step, source="none", lost_steps=lost_steps, seconds=0.1))


def log_shipper(run, name, *, is_first=True, print_line=lambda text: None):
    return LogShipper(run, name, is_first=lambda: is_first, print_line=print_line)


def uploaded(run, name, **options):
    """As the agent does, from its start to its end."""
    one = log_shipper(run, name, **options)
    one.start()
    assert one.close(120.0) == ""


def steps(run):
    with readable(run) as there:
        return [(line.step, line.generation) for line in metrics.read(there.metrics)]


def told(run, *fields):
    with readable(run) as there:
        return [tuple(each[name] for name in fields) for each in run_records.events(there.events)]


def test_a_new_rank_0_uploads_what_the_lost_one_had_not(node):
    """Node a uploads up to step 4 of 6 and is lost. Node b has the same lines, and continues as
    rank 0 after step 5. Then b is lost, and c continues, which has no lines.
    """
    a, b, c = node("a"), node("b"), node("c")
    restored(a, "a", 1, 0)
    trained(a, "a", 1, 1, 4)
    uploaded(a, "a")
    trained(b, "b", 1, 1, 6)
    uploaded(b, "b", is_first=False)
    assert steps(a) == [(s, 1) for s in range(1, 5)]

    restored(b, "b", 2, 5)
    trained(b, "b", 2, 6, 9)
    uploaded(b, "b")
    restored(c, "c", 3, 8)
    trained(c, "c", 3, 9, 12)
    uploaded(c, "c")
    assert steps(c) == [*enumerate([1] * 5 + [2] * 3 + [3] * 4, 1)]
    assert told(c, "generation", "lost_steps") == [(1, 0), (2, 0), (3, 1)]


def test_a_part_whose_answer_was_lost_is_stored_once(node, storage):
    """The store keeps each part, and the connection breaks; the next try lists the store and goes
    on.
    """
    run = node("a")
    restored(run, "a", 1, 0)
    trained(run, "a", 1, 1, 3)
    files = log_shipper(run, "a")
    objects = files._objects
    assert objects.read("anything") is None
    lost = storage.fail(Deed.LOSE, lambda method, path: method == "PUT")
    limit_s, objects._limit_s = objects._limit_s, 1.0  # it is known to pass
    while lost.struck < 2:
        # The library tries again by itself, and finds that the part exists.
        with contextlib.suppress(StoreFailed):
            files.upload()
    objects._limit_s = limit_s
    storage.heal()
    restored(run, "a", 2, 3)
    trained(run, "a", 2, 4, 5)
    while not files.upload():
        pass
    assert steps(run) == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert told(run, "generation") == [(1,), (2,)]


def test_an_outage_of_the_store_is_said_once_and_so_is_its_end(node, storage, monkeypatch):
    """500 to every request for a while. What was written meanwhile arrives: test_objects.py."""
    monkeypatch.setattr(shipper, "FIRST_PAUSE_S", 0.01)
    said, outage = queue.SimpleQueue(), storage.fail(Deed.ERROR, lambda method, path: True)
    one = log_shipper(node("a"), "a", print_line=said.put)
    one.start()
    assert "training goes on" in said.get(timeout=120)
    struck = outage.struck
    wait_for(lambda: outage.struck > struck + 9, "more tries")
    storage.heal()
    assert "again" in said.get(timeout=120)
    assert one.close() == "" and said.empty()


def test_what_did_not_arrive_is_said_and_uploaded_next_time(node, storage, monkeypatch):
    """All requests hang for the whole time that the end may take, and then two of the next end's,
    which makes them again.
    """
    monkeypatch.setattr(shipper, "PART_LIMIT_S", 2.0)
    run = node("a")
    restored(run, "a", 1, 0)
    trained(run, "a", 1, 1, 3)
    with pytest.raises(UsageError, match="found nothing there"):
        steps(run)
    storage.fail(Deed.HANG, lambda method, path: method == "PUT")
    one = log_shipper(run, "a")
    assert one.close() == ""  # never started
    one.start()
    said = one.close(3.0)
    assert f"have not reached {run.url}" in said and f"they stay in {run.local}" in said
    storage.heal()
    hung = storage.fail(Deed.HANG, lambda method, path: method == "PUT", times=2)
    assert upload_left_behind(run, 240.0) == ""
    assert hung.struck == 2
    assert steps(run) == [(1, 1), (2, 1), (3, 1)]


def test_the_age_of_a_heartbeat_is_that_of_its_object(node):
    """`status` shows it; the node's id has a character that object names do not."""
    run = node("a")
    Objects(run.url).write("rendezvous/beats/a%20b", b"7")
    ages_s = heartbeat_ages_s(run.rendezvous_url)
    assert ages_s.keys() == {"a b"}
    assert abs(ages_s["a b"]) < 3600


def test_the_age_of_a_nodes_newest_heartbeat_is_that_of_its_file(tmp_path):
    backend = DirectoryBackend(tmp_path)
    backend.show("a b", "1")
    os.utime(tmp_path / "beats" / "a%20b", (file_time_s() - 7000.0,) * 2)
    assert heartbeat_ages_s(str(tmp_path))["a b"] == pytest.approx(7000.0, abs=3600)
    assert heartbeat_ages_s(str(tmp_path / "gone")) == {}
