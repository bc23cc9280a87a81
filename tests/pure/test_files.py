"""A small file appears whole under its name or not at all."""

import os
import tempfile

import pytest

from elastic.errors import UsageError
from elastic.system import files
from elastic.system.files import create_whole, scratch_folder


@pytest.mark.parametrize("other", ["file", "backup"])
def test_a_draft_with_two_names_is_ours_if_one_is_the_files(tmp_path, monkeypatch, other):
    """NFS repeats a request whose answer was lost, and reports that the name is taken. A backup
    that copies by hard links gives each file a second name, at any moment.
    """
    path, link = tmp_path / "file", os.link
    assert other == "file" or create_whole(path, b"first", fsync=False)

    def twice(source, target):
        link(source, tmp_path / other)
        link(source, target)

    monkeypatch.setattr(files.os, "link", twice)
    assert create_whole(path, b"second", fsync=False) is (other == "file")
    assert path.read_bytes() == (b"second" if other == "file" else b"first")


def test_a_folder_goes_at_its_end_and_no_place_for_it_is_named(tmp_path, monkeypatch):
    """That it was removed, say."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("preflight-") as ours:
        (ours / "errors").mkdir()
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"gone.*set TMPDIR"), scratch_folder():
        pass
