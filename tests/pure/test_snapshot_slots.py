"""Whichever process is killed at any moment, the snapshot that is found is whole and the newest."""

import os
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from elastic.snapshot.slots import HEADER_BYTES, INFO_LIMIT_BYTES, PAGE, SnapshotInfo, SnapshotSlots
from elastic.system.processes import available_bytes

SIZES = st.integers(1, 2 * PAGE)
SLOTS = st.integers(0, 2)


def info(step, **fields):
    return SnapshotInfo(step=step, generation=1, **fields)


class SlotsAndTheirTwin(RuleBasedStateMachine):
    """Writes, deaths, leases and invalidations in any order, beside a list of what was published.

    A reader with a mapping of its own checks after every step.
    """

    @initialize(slots=st.integers(1, 3))
    def make(self, slots):
        self.writer = self.owner = SnapshotSlots.create(2 * PAGE, slots)
        self.reader = SnapshotSlots.open(self.owner.path)
        self.published = []  # (slot, seq, bytes, info), the last one last
        self.gone = []  # (slot, seq) that were published once
        self.leases = [0] * slots
        self.writing = None
        self.count = 0

    def lose(self, slot):
        self.gone += [(each[0], each[1]) for each in self.published if each[0] == slot]
        self.published = [each for each in self.published if each[0] != slot]

    @precondition(lambda self: self.writing is None)
    @rule()
    def begin(self):
        slots, single = range(len(self.leases)), len(self.leases) == 1
        newest = self.published[-1][0] if self.published else None
        free = {slot for slot in slots if not self.leases[slot] and (slot != newest or single)}
        slot = self.writer.begin()
        assert (slot in free) if free else (slot is None)
        if slot is not None:
            useless = free - {each[0] for each in self.published}
            oldest = [each[0] for each in self.published if each[0] in free]
            assert slot in useless or (not useless and slot == oldest[0])
            self.writing = slot
            self.lose(slot)

    @precondition(lambda self: self.writing is not None)
    @rule(data=st.binary(min_size=1, max_size=2 * PAGE))
    def write_a_part(self, data):
        self.writer.body(self.writing)[: len(data)] = data

    @precondition(lambda self: self.writing is not None)
    @rule(size=SIZES)
    def write_all_and_publish(self, size):
        self.count += 1
        data, said = bytes([self.count % 256]) * size, info(self.count)
        self.writer.body(self.writing)[:size] = data
        snapshot = self.writer.publish(self.writing, size_bytes=size, info=said)
        self.published.append((self.writing, snapshot.seq, data, said))
        self.writing = None

    @rule()
    def the_writer_dies(self):
        """At any point; its successor knows nothing but the memory."""
        if self.writer is not self.owner:
            self.writer.close()
        self.writer, self.writing = SnapshotSlots.open(self.owner.path), None

    @precondition(lambda self: self.writing is not None)
    @rule(stores=st.integers(0, 2))
    def the_writer_dies_in_its_publishing(self, stores):
        """After so many of the words that it stores."""
        dying, stored = SnapshotSlots.open(self.owner.path), []

        def store(*words):
            if len(stored) == stores:
                raise InterruptedError
            stored.append(SnapshotSlots._set(dying, *words))

        dying._set = store
        with pytest.raises(InterruptedError):
            dying.publish(self.writing, size_bytes=1, info=info(self.count))
        dying.close()
        self.the_writer_dies()

    @precondition(lambda self: self.published or self.gone)
    @rule(data=st.data())
    def lease(self, data):
        whole = [(each[0], each[1]) for each in self.published]
        slot, seq = data.draw(st.sampled_from(whole + self.gone))
        found = self.reader.lease(slot, seq)
        assert (found is not None) is ((slot, seq) in whole)
        assert found in (None, *self.reader.whole())
        self.leases[slot] += (slot, seq) in whole

    @rule(slot=SLOTS)
    def release(self, slot):
        if slot < len(self.leases) and self.leases[slot]:
            self.reader.release(slot)
            self.leases[slot] -= 1

    @rule()
    def the_lessee_dies(self):
        self.owner.release_all()
        self.leases = [0] * len(self.leases)

    @rule(slot=SLOTS)
    def invalidate(self, slot):
        if slot < len(self.leases) and slot != self.writing:
            self.writer.invalidate(slot)
            self.lose(slot)

    @invariant()
    def what_is_found_is_what_was_published(self):
        found = self.reader.whole()
        assert [(each.slot, each.seq, each.info) for each in found] == [
            (slot, seq, said) for slot, seq, _, said in reversed(self.published)
        ]
        for snapshot, (_, _, data, _) in zip(found, reversed(self.published), strict=True):
            assert bytes(self.reader.body(snapshot.slot)[: snapshot.size_bytes]) == data
            assert os.pread(self.reader.fd, snapshot.size_bytes, self.reader.offset(snapshot.slot)) == data
        assert not any(self.reader.is_whole(slot, seq) for slot, seq in self.gone)

    def teardown(self):
        for slots in {self.writer, self.owner, self.reader}:
            slots.close()


def test_any_order_of_events_keeps_the_newest_published_whole():
    bounds = settings(max_examples=60, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(SlotsAndTheirTwin, settings=bounds)


def test_no_number_of_a_thrown_away_snapshot_is_given_again():
    """The machine draws it rarely: the newest goes, and its slot is the next to be written."""
    with closing(SnapshotSlots.create(PAGE, 2)) as slots:
        seqs = []
        for step in (1, 2):
            slot = slots.begin()
            seqs.append(slots.publish(slot, size_bytes=1, info=info(step)).seq)
            slots.invalidate(slot)
        assert seqs == sorted(set(seqs))


def test_memory_is_there_and_outlives_its_closing():
    """Allocated at once: a page that could not be had later would be a SIGBUS in the middle of a
    copy. A tensor may still lie on a body that is closed.
    """
    slots = SnapshotSlots.create(100 * PAGE, 3)
    status, body = os.fstat(slots.fd), slots.body(0)
    assert status.st_blocks * 512 >= status.st_size
    body[:3] = b"abc"
    slots.close()
    assert bytes(body[:3]) == b"abc"


def open_files():
    """Number and file; what earlier tests left behind may be collected at any moment."""
    there = (path for path in Path("/proc/self/fd").iterdir() if path.exists())
    return {(path.name, path.stat().st_ino) for path in there}


MACHINE = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    5000 kB\n"}
GROUP = "sys/fs/cgroup/job/step"


def test_the_least_of_what_machine_and_groups_have_left_counts(tmp_path):
    """A machine's files are added one by one: the machine's own, a group without a limit, with one,
    with cache to give up, and a narrower group around it.
    """
    around = "sys/fs/cgroup/job"
    added = [
        ({}, None),
        (MACHINE, 5000 * 1024),
        ({"proc/self/cgroup": "0::/job/step\n", f"{GROUP}/memory.max": "max\n"}, 5000 * 1024),
        ({f"{GROUP}/memory.max": "300\n", f"{GROUP}/memory.current": "200\n"}, 100),
        ({f"{GROUP}/memory.stat": "anon 90\ninactive_file 50\nactive_file 7\n"}, 150),
        ({f"{around}/memory.max": "90\n", f"{around}/memory.current": "70\n"}, 20),
        ({f"{around}/memory.current": "95\n"}, 0),
    ]
    for files, left in added:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        assert available_bytes(tmp_path) == left


def test_missing_memory_is_an_error_and_leaves_no_descriptor(monkeypatch):
    """More than is left is refused before it is taken: Linux would grant it, and kill a process of
    its choice once it is written. With a descriptor that stays, memory would stay.
    """

    before = open_files()
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        SnapshotSlots.create(PAGE, 3)
    needed = 2 * PAGE + HEADER_BYTES
    monkeypatch.setattr("elastic.snapshot.slots.available_bytes", lambda: needed - 1)
    with pytest.raises(OSError, match=f"expected {needed} bytes of memory, found {needed - 1} left"):
        SnapshotSlots.create(PAGE, 1)
    assert open_files() <= before


def words(*values):
    return b"".join(value.to_bytes(8, "little") for value in values)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * PAGE,
        words(0, PAGE) + bytes(PAGE - 16),
        words(1, PAGE) + bytes(2 * PAGE),
        words(3, PAGE) + bytes(3 * PAGE - 16),
        words(2**62, 2**62) + bytes(PAGE),
    ],
    ids=["empty", "other", "no slots", "short", "fewer slots", "absurd"],
)
def test_a_file_that_is_no_memory_for_snapshots_is_refused(content):
    """Nothing is mapped before it is known how long the file is; the descriptor is closed."""
    fd = os.memfd_create("fake")
    os.write(fd, content)
    before = open_files()
    with pytest.raises(ValueError, match="bytes in all"):
        SnapshotSlots.open(f"/proc/self/fd/{fd}")
    assert open_files() <= before
    os.close(fd)


def test_a_header_changed_in_memory_is_no_snapshot():
    """The size beyond the body, then text that is no JSON: the older one is found instead."""
    slots = SnapshotSlots.create(PAGE, 3)
    for value in (1, 2):
        slot = slots.begin()
        slots.publish(slot, size_bytes=value, info=info(value))
    newest = slots.whole()[0]
    at = slots.offset(newest.slot) - HEADER_BYTES
    os.pwrite(slots.fd, words(2**40), at + 16)
    assert slots.whole()[0].info == info(1)
    os.pwrite(slots.fd, words(2), at + 16)
    assert slots.whole()[0] == newest
    os.pwrite(slots.fd, b"x", at + 40)
    assert slots.whole()[0].info == info(1)
    slots.close()


def test_data_are_kept_in_a_header_only_if_they_fit():
    """Without them a snapshot is as good: the image has them too."""
    most = INFO_LIMIT_BYTES - len(info(3).to_json())
    for length in (most, most + 1):
        said = info(3, data="x" * length)
        assert SnapshotInfo.parse(said.to_json()) == (said if length == most else info(3))


def test_a_header_names_parts_that_there_are():
    part = {"number": 2, "start": 0, "size_bytes": 1, "checksum": "c", "is_copy": False}
    with pytest.raises(ValueError, match="names a part"):
        SnapshotInfo.parse(info(3, of=2, parts=[part]).to_json())
