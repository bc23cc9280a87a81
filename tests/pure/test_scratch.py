"""A process has a temporary folder of its own."""

import tempfile

import pytest

from elastic.errors import UsageError
from elastic.system.scratch import scratch_folder


def test_a_folder_goes_at_its_end_and_no_place_for_it_is_named(tmp_path, monkeypatch):
    """That it was removed, say."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("preflight-") as ours:
        (ours / "errors").mkdir()
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"gone.*set TMPDIR"), scratch_folder():
        pass
