"""Temporary folders of processes that were killed are removed, and no others."""

import os
import signal
import tempfile

import pytest

from elastic.errors import UsageError
from elastic.system.scratch import open_scratch, scratch_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_goes_with_the_next(temporary):
    """A folder without a lock, one of a live process, and one of a process that got SIGKILL."""
    (temporary / "elastic-notes").mkdir()
    with scratch_folder() as ours:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            theirs, _ = open_scratch("preflight-")
            (theirs / "errors").mkdir()
            os.write(writer, os.fsencode(theirs))
            signal.pause()
        theirs = temporary / os.fsdecode(os.read(reader, 4096))
        with scratch_folder() as third:
            assert {*temporary.iterdir()} == {temporary / "elastic-notes", ours, theirs, third}
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with scratch_folder() as third:
            assert {*temporary.iterdir()} == {temporary / "elastic-notes", ours, third}
    assert {*temporary.iterdir()} == {temporary / "elastic-notes"}
    os.close(reader)
    os.close(writer)


def test_an_unwritable_temporary_folder_is_named(temporary, monkeypatch):
    """It was removed, say."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    with pytest.raises(UsageError, match=r"gone.*set TMPDIR"), scratch_folder():
        pass
