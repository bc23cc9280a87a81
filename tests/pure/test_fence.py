"""How an uploader learns the newest generation, above all through the mirror of its agent."""

import errno
import threading
import time
from pathlib import Path

import pytest

from elastic.errors import StoreFailed, UsageError
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.backends.select import RendezvousConfig
from elastic.system.files import replace_whole
from elastic.testing.fakes import FakeClock
from elastic.uploader import fence
from elastic.uploader.fence import Mirror, MirrorStale, open_fence, read_mirror


def stamped(path, generation, *, age_s):
    path.write_text(f"{generation} {int((time.clock_gettime(time.CLOCK_BOOTTIME) - age_s) * 1e9)}")


def test_a_fresh_mirror_is_used_at_once(tmp_path):
    """The clock of the reader does not move."""
    clock = FakeClock()
    stamped(tmp_path / "m", 7, age_s=0.0)
    assert read_mirror(tmp_path / "m", clock) == 7
    assert clock.now == 1000.0


def test_after_a_sleep_the_agents_next_number_counts(tmp_path):
    """Agent and uploader were frozen for a minute, in which generation 8 began; the uploader wakes
    first.
    """
    clock = FakeClock()
    stamped(tmp_path / "m", 7, age_s=60.0)
    nap = clock.sleep

    def sleep(seconds):
        nap(seconds)
        if clock.now > 1000.3:
            stamped(tmp_path / "m", 8, age_s=0.0)

    clock.sleep = sleep
    assert read_mirror(tmp_path / "m", clock) == 8


def test_the_last_number_of_a_dead_agent_counts(tmp_path):
    """The mirror is not written any more."""
    clock = FakeClock()
    stamped(tmp_path / "m", 7, age_s=60.0)
    assert read_mirror(tmp_path / "m", clock) == 7
    assert fence.FRESH_S <= clock.now - 1000.0 < 2 * fence.FRESH_S


def test_what_deletes_relies_on_no_number_of_a_dead_agent(tmp_path):
    """A newer generation may have resumed from what it would delete."""
    clock = FakeClock()
    stamped(tmp_path / "m", 7, age_s=60.0)
    with pytest.raises(MirrorStale, match="generation 7"):
        read_mirror(tmp_path / "m", clock, must_be_fresh=True)
    stamped(tmp_path / "m", 7, age_s=0.0)
    assert read_mirror(tmp_path / "m", clock, must_be_fresh=True) == 7


def test_a_mirror_shows_the_newest_answer_of_the_store(tmp_path):
    """The store answers, fails, answers with an older number, and with a newer one."""
    answers = [3, BackendFailed("away"), 1, 5]
    came = threading.Event()

    def shown():
        if not answers:
            came.set()
            return 0
        answer = answers.pop(0)
        if isinstance(answer, BackendFailed):
            raise answer
        return answer

    mirror = Mirror(shown, tmp_path / "m")
    assert read_mirror(tmp_path / "m", FakeClock()) in (0, 3)
    assert came.wait(timeout=60)
    mirror.close()
    number, _, written = (tmp_path / "m").read_text().partition(" ")
    assert (number, written.isdecimal()) == ("5", True)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_agent_that_does_not_reach_the_store_leaves_its_mirror_to_age(tmp_path):
    """The others may be in a newer generation: the old number must not look fresh. The third
    failure comes after the second was taken up.
    """
    answers, failed = [7], threading.Semaphore(0)

    def shown():
        if answers:
            return answers.pop()
        failed.release()
        raise BackendFailed("cut off")

    mirror = Mirror(shown, tmp_path / "m")
    assert failed.acquire(timeout=60)
    before = (tmp_path / "m").read_text()
    assert failed.acquire(timeout=60)
    assert failed.acquire(timeout=60)
    mirror.close()
    assert before.startswith("7 ")
    assert (tmp_path / "m").read_text() == before


def test_a_mirror_goes_on_once_a_full_disk_has_room_again(tmp_path, monkeypatch):
    """Writing fails twice; afterwards the newest number must still reach the mirror."""
    refused, written = [], threading.Event()

    def full(*arguments, **options):
        if len(refused) < 2:
            refused.append(arguments)
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_whole(*arguments, **options)
        written.set()

    mirror = Mirror(lambda: 5, tmp_path / "m")
    monkeypatch.setattr(fence, "replace_whole", full)
    assert written.wait(timeout=60)
    mirror.close()
    assert (tmp_path / "m").read_text().split()[0] == "5"


@pytest.mark.parametrize("text", ["", "7", "7 x", "x 7", "7 7 7"])
def test_a_malformed_mirror_stops_the_save(tmp_path, text):
    (tmp_path / "m").write_text(text)
    with pytest.raises(StoreFailed, match="expected the number"):
        open_fence(f"mirror:{tmp_path / 'm'}")()


@pytest.mark.parametrize(("text", "newest"), [("1", 1), ("2\n", 2), ("0", 0), (None, 0)])
def test_a_fence_is_the_number_in_its_file(tmp_path, text, newest):
    """The file holds a generation, one with a line's end, or does not exist yet."""
    if text is not None:
        (tmp_path / "fence").write_text(text)
    assert open_fence(f"file:{tmp_path / 'fence'}")() == newest


@pytest.mark.parametrize("text", ["", "two", "-1", "1.5"])
def test_a_fence_without_a_number_stops_the_save(tmp_path, text):
    """Taking it for 0 would let an old writer commit."""
    (tmp_path / "fence").write_text(text)
    with pytest.raises(StoreFailed, match="expected the number"):
        open_fence(f"file:{tmp_path / 'fence'}")()


def test_no_fence_fences_nothing_and_an_unknown_fence_is_refused():
    assert open_fence(None)() == 0
    with pytest.raises(UsageError, match="expected a fence"):
        open_fence("smoke:signal")


@pytest.mark.parametrize("group", ["my run", "a,b", "a/b x:1,y:2", "größe ∅", "per%20cent"])
def test_the_fence_of_etcd_names_any_group(group, monkeypatch):
    """A name with a space was taken apart there: its end became the address of a server."""
    opened = []

    class FakeEtcd:
        def __init__(self, endpoints, group, _access):
            opened.append((endpoints, group))

        def shown_generation(self):
            return 3

    monkeypatch.setattr("elastic.rendezvous.backends.etcd.EtcdBackend", FakeEtcd)
    config = RendezvousConfig(kind="etcd", endpoint="one:2379,two:2379", group=group)
    assert fence.open_fence(config.fence(Path("unused")))() == 3
    assert opened == [("one:2379,two:2379", group)]
