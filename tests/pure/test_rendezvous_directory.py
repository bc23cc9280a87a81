"""What a folder adds to the contract of a backend: old listings, power cuts, full disks."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from elastic.errors import UsageError
from elastic.rendezvous.backends import directory
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.directory import DirectoryBackend


def test_a_writer_that_slept_recreates_no_deleted_version(tmp_path):
    """It has read version 1 and sleeps until the successor of 1 is deleted as too old, so its name
    is free.
    """
    sleeper, busy = DirectoryBackend(tmp_path), DirectoryBackend(tmp_path)
    assert busy.compare_and_set(None, b"1")
    for version in range(1, 40):
        assert busy.compare_and_set(version, str(version + 1).encode())
    # The listing before the link is as old as the sleeper; the one after it is up to date.
    old, listed = [[1]], sleeper._versions
    sleeper._versions = lambda: old.pop() if old else listed()
    assert not sleeper.compare_and_set(1, b"zombie")
    assert len(list(tmp_path.glob("state-*"))) == directory.KEPT_VERSIONS
    assert DirectoryBackend(tmp_path).read() == (40, b"40")


def test_files_of_dead_processes_are_removed_and_all_others_stay(tmp_path):
    """A draft, a heartbeat and files of another program are two hours old; a heartbeat is fresh."""
    backend = DirectoryBackend(tmp_path)
    old, live = "host-1-0123abcd", "host-2-0123abcd"
    backend.show(old, "1")
    backend.show(live, "1")
    foreign = {".tmp-data", "beats/box.txt", "elastic-notes"}
    for name in (".elastic-dead", *foreign):
        (tmp_path / name).touch()
    for name in (f"beats/{old}", ".elastic-dead", *foreign):
        before_s = (tmp_path / name).stat().st_mtime - 7200
        os.utime(tmp_path / name, (before_s, before_s))
    DirectoryBackend(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {f"beats/{live}", *foreign}


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path):
    """A name, or its parent's, belongs to a file, or to a file system without room for files."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "r", Path("/proc"), Path("/proc/rendezvous")):
        with pytest.raises(UsageError, match="should be a folder that this user may write"):
            DirectoryBackend(path)


def test_of_two_histories_the_later_generation_counts(tmp_path):
    """A person empties the folder while a node sleeps; another begins it again, below the sleeper's
    version, first in the same generation and then in a later one.
    """
    sleeper = DirectoryBackend(tmp_path)
    for version in (None, 1, 2):
        assert sleeper.compare_and_set(version, b'{"generation": 2}')
    assert sleeper.read() == (3, b'{"generation": 2}')
    for generation, counts in ((2, sleeper), (3, None)):
        for path in tmp_path.glob("state-*"):
            path.unlink()
        value = b'{"generation": %d, "new": 1}' % generation
        assert DirectoryBackend(tmp_path).compare_and_set(None, value)
        assert sleeper.read() == ((3, b'{"generation": 2}') if counts else (1, value))


def test_a_folder_emptied_between_link_and_listing_fails_no_call(tmp_path, monkeypatch):
    """A person removes all files just after the link."""
    backend = DirectoryBackend(tmp_path)
    listings = iter([[], []])
    monkeypatch.setattr(backend, "_versions", lambda: next(listings))
    assert backend.compare_and_set(None, b"one")


def test_a_file_system_without_hard_links_is_refused_at_once(tmp_path, monkeypatch):
    """As exFAT answers; no draft is left behind."""
    refusal = PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "link", Mock(side_effect=refusal))
    with pytest.raises(UsageError, match=r"hard links.*--rdzv-endpoint"):
        DirectoryBackend(tmp_path / "r")
    assert list((tmp_path / "r").iterdir()) == []


def test_versions_and_heartbeats_are_written_on_a_full_disk(tmp_path):
    """The disk has 70 bytes, and each new file takes more than what is left.

    A process that read before version 4 and comes late is still told so.
    """
    backend, late = DirectoryBackend(tmp_path), DirectoryBackend(tmp_path)
    write = os.write

    def full(fd, data):
        is_new = not os.fstat(fd).st_size
        used_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        if is_new and used_bytes + len(data) > 70:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    value = b'{"members": "nodes"}'
    for version in (None, 1, 2):
        assert backend.compare_and_set(version, value)
    backend.show("a", "1 a request")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", full)
        for version in (3, 4, 5):
            assert backend.compare_and_set(version, value)
            backend.show("a", "2")
        assert not late.compare_and_set(3, b"{}")
        with pytest.raises(BackendFailed, match="No space"):
            backend.compare_and_set(6, value * 4)
    assert DirectoryBackend(tmp_path).read() == (6, value)
    assert backend.shown() == {"a": "2"}
