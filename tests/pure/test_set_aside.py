"""--fresh renames a run directory under its lease, and leaves the lease free."""

from pathlib import Path

import pytest

from elastic.agent.set_aside import set_aside
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.rendezvous.lease import RunLease
from elastic.system.clock import SystemClock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.parse(str(tmp_path / "run"))
    run.local.mkdir()
    (run.local / "run.json").write_text("{}")
    return run


def is_free(folder: Path) -> bool:
    lease = RunLease(str(folder), SystemClock())
    newest = lease.newest()
    return newest is not None and lease.is_released(newest)


def test_a_run_that_was_set_aside_may_go_on_under_its_new_name_at_once(run: RunDir) -> None:
    set_aside(run, SystemClock(), print)
    (aside,) = run.local.parent.iterdir()
    assert aside.name.startswith("run.aside-") and is_free(aside)


def test_a_run_directory_that_cannot_be_renamed_stays_as_it_is_and_free(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it is a mount point."""

    def refuse(_path: Path, _target: Path) -> None:
        raise OSError("busy")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UsageError, match="busy"):
        set_aside(run, SystemClock(), print)
    assert is_free(run.local)


def test_an_empty_directory_is_not_set_aside(tmp_path: Path) -> None:
    set_aside(RunDir.parse(str(tmp_path)), SystemClock(), print)
    assert list(tmp_path.iterdir()) == []
