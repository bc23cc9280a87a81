"""Two run directories of one path meet in a store that serves many runs."""

from collections import defaultdict
from collections.abc import Callable

import pytest

from elastic.agent.signpost import KEEP_ALIVES, POLL_S, check_shared
from elastic.errors import UsageError
from elastic.rendezvous.shared_settings import RunKey
from elastic.testing.fakes import FakeClock, MemoryBackend

KEEP_ALIVE_S = 2.0
URL = "/data/runs/one"


class World(FakeClock):
    """The groups of a store. `meanwhile` is called at each sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: defaultdict[str, MemoryBackend] = defaultdict(MemoryBackend)
        self.meanwhile: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.meanwhile()

    def come(self, uid: str, *, run_id: str = "1", url: str = URL) -> float:
        """A node comes; returns how long it waited, in seconds."""
        before = self.now
        run = RunKey(run_id=run_id, uid=uid)
        check_shared(self.groups.__getitem__, url, run, keep_alive_s=KEEP_ALIVE_S, clock=self)
        return self.now - before


def test_nodes_of_one_directory_do_not_wait() -> None:
    world = World()
    assert world.come("a") == world.come("a") == 0.0


def test_a_directory_of_the_same_path_is_refused_while_the_other_lives() -> None:
    """Also where the other's first node joins only after the newcomer has come."""
    world = World()
    world.come("a")
    world.meanwhile = lambda: world.groups["a"].beat("n")
    with pytest.raises(UsageError, match=r"not shared: .*\(a there, b here\)"):
        world.come("b")
    assert world.come("a") == 0.0


def test_a_directory_whose_nodes_are_dead_makes_way() -> None:
    """A heartbeat that stands still is none. The first one that comes later is refused in turn."""
    world = World()
    world.groups["a"].beat("n")
    world.come("a")
    assert KEEP_ALIVES * KEEP_ALIVE_S <= world.come("b") <= KEEP_ALIVES * KEEP_ALIVE_S + 2 * POLL_S
    world.meanwhile = lambda: world.groups["b"].beat("m")
    with pytest.raises(UsageError, match="not shared"):
        world.come("a")


@pytest.mark.parametrize("other", [{"run_id": "2"}, {"url": "/data/runs/two"}])
def test_other_commands_and_other_paths_are_other_runs(other: dict[str, str]) -> None:
    world = World()
    world.come("a")
    assert world.come("b", **other) == 0.0
