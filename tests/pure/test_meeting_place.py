"""A run directory has one place to meet at a time, whatever comes at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest

from elastic.agent.run_directory import rendezvous_config
from elastic.config.options import Options
from elastic.config.run_dir import PLACE, RunDir
from elastic.errors import UsageError
from elastic.rendezvous import meeting_place
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.meeting_place import ALONE, KEEP_ALIVES, Place, Watch, beats_at, config_of
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock

DIR = Place(kind="dir", who="a", token="1")
ELSEWHERE = Place(kind="c10d", endpoint="host:1", group="run", who="b", token="2")
CHANGED = pytest.raises(UsageError, match="is another run's")


class World(FakeClock):
    """Nodes whose heartbeats move at each look of another, unless they are dead."""

    def __init__(self, folder):
        super().__init__()
        self.run = RunDir.parse(str(folder))
        self.living = lambda: False
        self.count = 0
        self.said = []

    def beats(self, _run, _place):
        def read():
            self.count += self.living()
            return {"a": str(self.count)}

        return read

    @property
    def watch(self):
        return Watch(run=self.run, clock=self, notify=self.said.append, beats_of=self.beats)

    def take(self, place):
        return self.watch.take(place)

    @property
    def number(self):
        found = meeting_place.newest(self.run, self)
        return 0 if found is None else found[0]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "run")


def test_nodes_of_one_address_meet_at_once(world):
    assert world.take(DIR) == DIR
    assert world.take(Place(kind="dir", who="z")) == DIR
    assert world.now == FakeClock().now and world.number == 1
    longest = replace(DIR, keep_alive_s=30.0)  # for which a command that watches waits
    assert world.take(longest) == world.take(DIR) == longest


@pytest.mark.parametrize("pair", [(DIR, ELSEWHERE), (Place(kind=ALONE, who="a"), Place(kind=ALONE, who="b"))])
def test_another_place_is_refused_while_nodes_live(pair, world):
    """Two processes that are alone share none."""
    world.take(pair[0])
    world.living = lambda: True
    with pytest.raises(UsageError, match="is in use"):
        world.take(pair[1])
    assert world.number == 1


def test_the_place_of_dead_nodes_makes_way(world):
    """One heartbeat may have been on its way as its node died."""
    world.take(DIR)
    began = world.now
    world.living = lambda: began < world.now < began + 0.3
    assert world.take(ELSEWHERE) == ELSEWHERE
    assert KEEP_ALIVES * DIR.keep_alive_s <= world.now - began < 1.5 * KEEP_ALIVES * DIR.keep_alive_s


def test_a_place_that_does_not_answer_is_left_to_a_person(world):
    fail = Mock(side_effect=BackendFailed("no route"))
    world.take(ELSEWHERE)
    meeting_place.release(world.run, DIR, world)  # not its own
    with pytest.raises(UsageError, match=f"remove .*/{PLACE}: .* does not answer: no route"):
        replace(world.watch, beats_of=fail).take(DIR)
    meeting_place.release(world.run, ELSEWHERE, world)
    assert replace(world.watch, beats_of=fail).take(DIR) == DIR


def test_of_nodes_that_come_at_once_all_meet_in_one_place(tmp_path):
    """Half of them come with another address; the heartbeats of whoever is first move."""
    run, counter, barrier = RunDir.parse(str(tmp_path)), iter(range(10**9)), threading.Barrier(8)

    def beats(_run, _place):
        return lambda: {"a": str(next(counter))}

    def come(number):
        watch = Watch(run=run, clock=SystemClock(), notify=lambda _line: None, beats_of=beats)
        barrier.wait()
        try:
            return watch.take(Place(kind="dir", endpoint=f"/{number % 2}", keep_alive_s=0.2)).endpoint
        except UsageError:
            return ""

    with ThreadPoolExecutor(8) as pool:
        found = sorted(pool.map(come, range(8)))
    assert found[:4] == [""] * 4 and len(set(found)) == 2


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_directory_that_became_another_runs_is_not_taken(world, fails_at):
    """Before the place is written, or just after."""
    calls = []

    def check():
        calls.append(1)
        if len(calls) == fails_at:
            raise UsageError("it is another run's")

    with CHANGED:
        world.watch.take(DIR, check=check)
    assert world.number == fails_at - 1


@pytest.mark.parametrize("text", ["", '{"kind": 1}'])
def test_a_damaged_place_is_named(world, text):
    folder = world.run.local / PLACE
    folder.mkdir(parents=True)
    (folder / "000001").write_text(text)
    with pytest.raises(UsageError, match=f"remove {folder}"):
        world.take(DIR)


def test_heartbeats_are_read_where_they_are_sent(tmp_path):
    """Of a folder that is gone none, and that is no silence."""
    run = RunDir.parse(str(tmp_path / "run"))
    for place in (Place(kind=ALONE), DIR):
        with pytest.raises(FileNotFoundError):
            beats_at(run, place)
        config_of(run, place).open({}).show("1", "5")
        assert beats_at(run, place)() == {"1": "5"}


def test_each_command_and_run_directory_has_its_group_in_etcd(tmp_path):
    """Nodes that come by another path find the group in the run directory."""

    def group(folder, recipe="a.py", there=None):
        options = Options(recipe=recipe, run_dir=folder, rdzv_backend="etcd", rdzv_endpoint="a:1")
        return rendezvous_config(options, RunDir.parse(str(tmp_path / folder)), there).group

    assert group("x") == group("x") != group("y")
    assert group("x") != group("x", recipe="b.py")
    assert group("y", there=Place(kind="etcd", group=group("x"))) == group("x")


@pytest.mark.parametrize(
    ("lives", "group_after_s", "refused"), [(True, 1e9, True), (True, 2.0, False), (False, 1e9, False)]
)
def test_nodes_that_lost_their_group_keep_others_out(world, lives, group_after_s, refused):
    """Nodes that begin now send heartbeats before they have a group, too, and not for long."""
    world.living, began_s = (lambda: lives), world.now

    def is_lost():
        return world.now - began_s < group_after_s

    def look():
        world.watch.check_lost_state(DIR, is_lost)

    if refused:
        with pytest.raises(UsageError, match="has lost their group"):
            look()
    else:
        look()
    assert (world.now - began_s > meeting_place.START_S) == refused
