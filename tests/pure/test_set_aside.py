"""--fresh renames a run directory under its lease, and leaves the lease free."""

import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastic.agent import set_aside as set_aside_module
from elastic.agent.claim_run_dir import check_claim, claim
from elastic.agent.set_aside import set_aside
from elastic.config import identity
from elastic.config.identity import NAME, Identity
from elastic.config.run_dir import UID, RunDir
from elastic.errors import UsageError
from elastic.rendezvous import lease as lease_module
from elastic.rendezvous.first_look import Holder
from elastic.rendezvous.lease import Lease, RunLease
from elastic.storage.remote import open_store
from elastic.storage.store import create_or_read
from elastic.system.clock import Clock, SystemClock
from elastic.testing.fakes import FakeClock

OLD, FRESH, OTHER = (
    Identity(
        recipe="tiny.py",
        recipe_sha256="",
        arguments=(),
        seed=seed,
        global_batch=8,
        shards=2,
        torch="2",
        device="cpu",
        threads=1,
    )
    for seed in (0, 1, 2)
)
RECORDS = [f"checkpoints/{step:012d}/COMMIT.json" for step in (4, 8)]
STAYING = ["rendezvous/state-000001"]
MOVED = [NAME, *RECORDS, "checkpoints/000000000004/a-1-x/state.safetensors", "logs/a", "metrics/a", UID]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.parse(str(tmp_path / "run"))
    run.local.mkdir()
    (run.local / "run.json").write_text("{}")
    return run


@pytest.mark.parametrize("place", ["sweep/two", "two", "logs/two", "checkpoints/two"])
@pytest.mark.parametrize("mark", [NAME, UID])
def test_a_run_that_lies_within_another_one_is_not_moved_with_it(run: RunDir, place: str, mark: str) -> None:
    """It may train there: its processes would go on in a folder that nobody resumes from. A script
    without the library has no run.json.
    """
    inner = run.local / place
    (inner / "lease").mkdir(parents=True)
    (inner / mark).write_text("{}")
    with pytest.raises(UsageError, match=f"found another one in {inner}"):
        set_aside(run, SystemClock(), print)
    assert not (run.local / "lease").exists()
    (inner / mark).rename(inner / "notes.json")
    set_aside(run, SystemClock(), print)
    assert not run.local.exists()


def test_a_run_below_the_url_of_another_one_is_not_moved_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir.parse("memory://nested/run")
    for name in (NAME, "two/lease/000001"):
        assert open_store(run.url).create(name, b"{}")
    for mark in (NAME, UID):
        assert open_store(run.url).create(f"two/{mark}", b"{}")
        with pytest.raises(UsageError, match="found another one in memory://nested/run/two"):
            set_aside(run, SystemClock(), print)
        open_store(run.url).delete(f"two/{mark}")
    set_aside(run, SystemClock(), print)
    assert not any(each.name == NAME for each in open_store(run.url).list())


def is_free(folder: Path | RunDir) -> bool:
    url = folder.url if isinstance(folder, RunDir) else str(folder)
    lease = RunLease(url, SystemClock())
    newest = lease.newest()
    return newest is not None and lease.is_released(newest)


def test_what_fresh_has_renamed_stays_renamed_after_a_power_cut(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the new run would be gone with its folder, and the old one be there again."""
    run.rendezvous.mkdir()
    synced: list[Path] = []

    def sync(folder: Path) -> None:
        synced.append(folder)
        assert run.rendezvous.exists()

    monkeypatch.setattr(set_aside_module, "sync_folder", sync)
    set_aside(run, SystemClock(), lambda _text: None)
    (aside,) = run.local.parent.glob("run.aside-*")
    assert synced == [aside, run.local, run.local.parent]


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


def test_a_run_that_began_while_the_command_stood_still_is_not_renamed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the lease, and is stopped before it renames."""
    clock = FakeClock()

    def stop(_now_s: float) -> str:
        take(run, clock)
        return "later"

    monkeypatch.setattr("elastic.agent.set_aside.timestamp", stop)
    with pytest.raises(UsageError, match="another command took it over while this one stood still"):
        set_aside(run, clock, print)
    assert [path.name for path in run.local.parent.iterdir()] == ["run"] and not is_free(run.local)


def test_an_empty_directory_is_not_set_aside(tmp_path: Path) -> None:
    set_aside(RunDir.parse(str(tmp_path)), SystemClock(), print)
    assert list(tmp_path.iterdir()) == []


class Watched(FakeClock):
    """Calls `meanwhile` at each sleep."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.meanwhile()


class Moments:
    """Calls `at` before each call of fsspec's memory by the code under test."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at: Callable[[], None] | None = None
        for verb in ("_open", "pipe_file", "cp_file", "rm_file"):
            patch.setattr(MemoryFileSystem, verb, self._watched(getattr(MemoryFileSystem, verb)))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            at, self.at = self.at, None  # what `at` does itself is no moment
            if at is not None:
                at()
                self.at = at
            return call(*arguments, **options)

        return watched


@pytest.fixture
def moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Moments:
    monkeypatch.chdir(tmp_path)
    return Moments(monkeypatch)


def remote_run(moved: Collection[str] = MOVED) -> RunDir:
    """A run in an object store, whose nodes have left."""
    MemoryFileSystem.store.clear()
    run = RunDir.parse(f"memory://{uuid.uuid4().hex}/run")
    store = open_store(run.url)
    for name in (*moved, *STAYING):
        store.create(name, OLD.to_json() if name == NAME else b"old")
    lease = RunLease(run.url, FakeClock())
    lease.release(take(run, FakeClock()))
    return run


def take(run: RunDir, clock: Clock) -> Lease:
    return RunLease(run.url, clock).take(
        "a node",
        keep_alive_s=2.0,
        holder=lambda _token: Holder.ELSEWHERE,
        check=lambda: None,
        notify=lambda _line: None,
    )


def names_in(url: str) -> list[str]:
    return [each.name for each in open_store(url).list() if not each.name.startswith("lease/")]


def is_left_alone(run: RunDir) -> None:
    """Another command that comes now is refused as soon as it has seen two renewals."""
    held = RunLease(run.url, FakeClock()).newest()
    assert held is not None and held.place.startswith("a command with --fresh on ")

    holder = RunLease(run.url, FakeClock())
    with pytest.raises(UsageError, match="is in use: a command with --fresh"):
        take(run, Watched(lambda: holder.renew(held)))


def test_at_no_moment_of_a_move_in_an_object_store_is_the_lease_free(moments: Moments) -> None:
    run, seen = remote_run(), []

    def at() -> None:
        if UID not in names_in(run.url) or NAME not in names_in(run.url) or len(names_in(run.url)) < 8:
            is_left_alone(run)
            seen.append(True)

    moments.at = at
    set_aside(run, FakeClock(), print)
    moments.at = None
    assert len(seen) >= 2 * len(MOVED) - 2
    assert names_in(run.url) == STAYING and is_free(run)
    (aside,) = asides(run)
    assert names_in(aside) == sorted(MOVED)


def asides(run: RunDir) -> list[str]:
    """The URLs of what was set aside."""
    parent, _, name = run.url.rpartition("/")
    found = {each.name.partition("/")[0] for each in open_store(parent).list()}
    return sorted(f"{parent}/{each}" for each in found - {name})


def test_the_lease_is_renewed_while_one_object_is_moved(
    moments: Moments, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    """However large it is: the move of the first one ends only after ten renewals."""
    monkeypatch.setattr(lease_module, "REMOTE_RENEW_S", 0.001)
    monkeypatch.setattr("elastic.agent.set_aside.KEEP_ALIVE_S", 0.001)
    run, renewed = remote_run(), open_store("memory://")

    def count() -> int:
        path = f"{run.url.removeprefix('memory://')}/lease/000002-renewed"
        return int(b"".join(renewed.read(path))) if any(e.name == path for e in renewed.list()) else 0

    copy, waits = MemoryFileSystem.cp_file, [True]

    def slow(*arguments: Any) -> None:
        if waits.pop() if waits else False:
            wait_until(lambda: count() >= 10)
        copy(*arguments)

    monkeypatch.setattr(MemoryFileSystem, "cp_file", slow)
    set_aside(run, SystemClock(), print)
    assert names_in(run.url) == STAYING


def stopped_after(moments: Moments, changes: int) -> bool:
    """A command that is stopped for an hour after so many changes; another one begins there then.

    Returns whether it came to that.
    """
    run, clock = remote_run(), FakeClock()
    uids: list[str] = []
    names: list[str] = []

    def at() -> None:
        nonlocal changes
        changes -= NAME not in names_in(run.url)
        if not changes:
            changes = -1
            clock.now += 3600.0
            uids.append(claim(run, OTHER, clock))
            take(run, FakeClock())
            names[:] = names_in(run.url)

    moments.at = at
    with suppress(UsageError):
        set_aside(run, clock, print)
    moments.at = None
    if uids:
        gone = set(names) - set(names_in(run.url))
        assert len(gone) <= 1  # which was on its way
        if gone != {UID}:
            check_claim(run, OTHER, uids[0], clock)
    return bool(uids)


def test_a_command_that_stood_still_moves_nothing_of_the_run_that_began_meanwhile(moments: Moments) -> None:
    """But for the one object that is on its way."""
    changes = 1
    while stopped_after(moments, changes):
        changes += 1
    assert changes > 10


def commands(run: RunDir, declared: Identity) -> Iterator[str]:
    """A second command, write by write, up to where it asks for the lease; yields its uid."""
    store, clock = open_store(run.url), FakeClock()
    identity.check(identity.parse(create_or_read(store, NAME, declared.to_json(), clock)), declared, run.url)
    yield ""
    yield create_or_read(store, UID, b"second", clock).decode()


def begins(run: RunDir, declared: Identity, uid: str) -> bool:
    """Whether a command that has claimed the directory finds it so when it gets the lease."""
    try:
        check_claim(run, declared, uid, FakeClock())
    except UsageError:
        return False
    return True


def race(moments: Moments, writes: tuple[int, int], declared: Identity, *, asks_first: bool) -> int:
    """A command with --fresh, and one that makes its two writes before these calls of the first.

    Returns the number of the first one's calls. One of the two commands begins.
    """
    run, moment, uid = remote_run((NAME, RECORDS[0], UID)), 0, ""
    second: Iterator[str] | None = commands(run, declared)

    def at() -> None:
        nonlocal moment, second, uid
        moment += 1
        for _ in range(writes.count(moment)):
            try:
                uid = next(second) if second is not None else ""
            except UsageError:
                second = None

    moments.at = at
    set_aside(run, FakeClock(), print)
    moments.at = None
    answers = [begins(run, declared, uid)] if asks_first and uid else []
    moments.at = at
    try:
        answers.append(begins(run, FRESH, claim(run, FRESH, FakeClock())))
    except UsageError:
        answers.append(False)
    moments.at = None
    if len(answers) == 1:
        with suppress(UsageError):
            uid = [uid, *(second or ())][-1]  # what the first one ended before
        answers.append(bool(uid) and begins(run, declared, uid))
    assert answers.count(True) == 1, (writes, answers)
    return moment


@pytest.mark.parametrize("declared", [OLD, OTHER], ids=["of the old run", "of a third one"])
@pytest.mark.parametrize("asks_first", [True, False])
def test_of_a_fresh_command_and_another_one_in_an_object_store_one_begins(
    moments: Moments, declared: Identity, *, asks_first: bool
) -> None:
    """The other one makes each of its two writes at every moment of the first one's."""
    last = race(moments, (0, 0), declared, asks_first=asks_first)
    for first in range(1, last + 1):
        for second in range(first, last + 1):
            race(moments, (first, second), declared, asks_first=asks_first)


def test_a_move_that_was_cut_anywhere_is_completed_by_the_next_command(moments: Moments) -> None:
    """And until then the directory shows the newest checkpoint, or none."""
    run, cuts = remote_run(), []
    moments.at = lambda: cuts.append(dict(MemoryFileSystem.store))
    set_aside(run, FakeClock(), print)
    moments.at = None
    first = asides(run)
    for cut in cuts:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.store.update(cut)
        left = [name for name in RECORDS if name in names_in(run.url)]
        assert not left or left[-1] == RECORDS[-1]
        clock = FakeClock()
        clock.now += 100.0  # another name
        set_aside(run, clock, print)
        assert names_in(run.url) == STAYING
        found = {name for aside in asides(run) for name in names_in(aside)}
        assert found == set(MOVED), (first, asides(run))
