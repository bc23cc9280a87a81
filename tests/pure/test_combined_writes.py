"""Requests that come late, of nodes that died or left, that cannot be read, or get lost."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from rendezvous_world import WideBackend, World, parsed

from elastic.errors import Interrupted, StoreFailed
from elastic.rendezvous import observer, transitions
from elastic.rendezvous.backends.backend import BackendFailed, CollectsRequests
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.backends.object_store import ObjectStoreBackend
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.rendezvous import Rendezvous
from elastic.rendezvous.requests import Request, Verb, settings_digest
from elastic.rendezvous.shared_settings import RunKey, SharedSettings
from elastic.testing.fakes import FakeClock

KEEP_ALIVE_S = 2.0


class FaultyBackend(WideBackend):
    """reads: requests can be read. is_away: every call fails. loses_answers: a request is left, and
    the node learns that it was not. before_request: called with the node and the text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.is_away, self.loses_answers = True, False, False
        self.before_request: Callable[[str, str], None] = lambda _node, _text: None

    def read(self) -> tuple[int, bytes] | None:
        if self.is_away:
            raise BackendFailed("away")
        return super().read()

    def request(self, node_id: str, text: str) -> None:
        self.before_request(node_id, text)
        super().request(node_id, text)
        if self.loses_answers and text:
            raise BackendFailed("no answer")

    def requests(self) -> dict[str, str]:
        if not self.reads:
            raise BackendFailed("the folder of requests cannot be read")
        return super().requests()


@pytest.fixture(autouse=True)
def _three_are_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "ALL_WATCH_ALL", 2)
    monkeypatch.setattr(observer, "WATCHED", 1)


def made_world(*names: str, min_nodes: int = 1) -> tuple[World, FaultyBackend]:
    backend = FaultyBackend()
    policy = GroupPolicy(min_nodes=min_nodes, max_nodes=8, last_call_s=1.0, timeout_s=60.0)
    world = World(policy=policy, keep_alive_s=KEEP_ALIVE_S, backend=backend)
    for name in names:
        world.start(name)
    return world, backend


def wish(world: World, name: str, verb: Verb) -> str:
    """What this node would request of the group as it is now."""
    me, group = Node(id=name, address=name, nproc=1, port=1), world.group
    settings = settings_digest(group.settings)
    return Request(verb=verb, node=me, generation=group.generation, settings=settings).text


def test_nodes_that_cannot_read_requests_write_for_themselves() -> None:
    """All else works, as with a folder of requests that belongs to another user."""
    world, backend = made_world("a", "b", "c", "d", "e")
    backend.reads = False
    world.tick(10.0)
    assert world.group.member_ids == {"a", "b", "c", "d", "e"} and world.group.open
    world.leave("c")
    assert "c" not in world.group.member_ids


def test_a_request_whose_answer_was_lost_is_taken_back() -> None:
    """The call fails and has left the request all the same."""
    world, backend = made_world("a", "b", "c")
    backend.loses_answers = True
    world.tick(10.0)
    assert world.group.open and len(world.group.members) == 3
    assert backend.requests() == {}


def test_no_node_writes_a_leaver_back_that_had_asked_to_join() -> None:
    """Another node writes after the leaver's first poll. A third reads that version and the request
    a moment before it is taken back, and writes a moment after the leaver is through.
    """
    world, backend = made_world("a", "b", "c")
    world.tick(10.0)
    world.start("late")
    for name in ("a", "b", "c"):
        world.machines[name].is_frozen = True
    while not world.backend.requests():
        world.poll("late")
    read: list[tuple[int, Group]] = []

    def others_write(node_id: str, text: str) -> None:
        if node_id == "late" and not text and not read:
            version, value = backend.read() or (0, b"")
            assert backend.compare_and_set(version, value)
            joined = transitions.join(parsed(value), Node(id="late", address="late", nproc=1, port=1))
            read.append((version + 1, joined))

    backend.before_request = others_write
    world.machines["late"].rendezvous.leave()
    assert read, "the request was taken back"
    assert not backend.compare_and_set(read[0][0], read[0][1].to_json())
    assert "late" not in world.group.waiting_ids


def test_a_newcomer_does_not_let_a_node_go_that_believes_its_peers_dead() -> None:
    """All members but one are dead. It asks to leave its state to them, before it knows, and a node
    that has just come, to which all are alive, writes for others.
    """
    world, backend = made_world("a", "b", "c", "d")
    world.tick(10.0)
    for name in ("b", "c", "d"):
        world.kill(name)
    backend.request("a", wish(world, "a", Verb.WITHDRAW_SHARED))
    world.machines["a"].is_frozen = True
    world.start("new")
    while "new" not in world.group.waiting_ids:
        world.clock.sleep(0.01)
        world.poll("new")
    assert world.group.open and "a" in world.group.member_ids


def test_the_request_of_a_dead_node_brings_it_back_once() -> None:
    """It died when it had asked to join. The group waits for more nodes, and they come one by one:
    each is new, and knows nothing of that death.
    """
    world, backend = made_world("a", "b", "c", min_nodes=9)
    world.tick(4.0)
    backend.request("dead", wish(world, "dead", Verb.JOIN))
    for name in ("d", "e", "f"):
        world.start(name)
        world.tick(5 * KEEP_ALIVE_S)
        assert "dead" not in world.group.waiting_ids
    there = ["dead" in parsed(value).waiting_ids for value in backend.history()]
    assert sum(now and not before for before, now in pairwise(there)) == 1
    assert backend.requests() == {}


def test_a_request_is_void_in_the_next_run_of_the_same_name() -> None:
    """A node asks to join and dies with all others. Nodes of another run take the group over, and
    keep the number of its generation.
    """
    world, backend = made_world("a", "b", "c")
    world.tick(10.0)
    backend.request("dead", wish(world, "dead", Verb.JOIN))
    for name in ("a", "b", "c"):
        world.kill(name)
    run = RunKey(run_id="2", uid="2", title="another.py in runs/two")
    other = SharedSettings(run=run, min_nodes=1, max_nodes=8, keep_alive_s=KEEP_ALIVE_S)
    for name in ("x", "y", "z"):
        world.start(name, other)
    world.tick(10.0)
    assert world.group.member_ids == {"x", "y", "z"}
    taken_over = [parsed(value) for value in backend.history() if parsed(value).settings == other]
    assert not any("dead" in group.waiting_ids for group in taken_over)


def test_a_node_whose_write_is_due_pauses_while_the_backend_is_away() -> None:
    """Without a pause it would ask as fast as it can, for the whole outage."""
    clock, backend = FakeClock(), FaultyBackend()
    policy = GroupPolicy(min_nodes=1, max_nodes=8, last_call_s=1.0, timeout_s=60.0)
    node = Node(id="a", address="a", nproc=1)
    rendezvous = Rendezvous(
        backend, node, policy, keep_alive_s=KEEP_ALIVE_S, clock=clock, open_endpoint=lambda: "a:1"
    )
    settings = SharedSettings(run=RunKey(), min_nodes=1, max_nodes=8, keep_alive_s=KEEP_ALIVE_S)
    assert backend.compare_and_set(None, Group(settings=settings).to_json())

    def goes_away(_node: str, _text: str) -> None:
        backend.is_away = True

    backend.before_request = goes_away
    polls = 0

    def interrupted() -> bool:
        nonlocal polls
        polls += 1
        return polls > 100_000

    try:
        with pytest.raises(BackendFailed):
            rendezvous.join(interrupted)
    except Interrupted:
        pytest.fail("the clock stands still")
    finally:
        rendezvous.stop()


def fails_once(calls: list[int]) -> bool:
    calls.append(1)
    return len(calls) == 1


@pytest.mark.parametrize("kind", ["dir", "object store"])
def test_a_request_whose_removal_failed_is_removed_by_the_next_try(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was forgotten, it named a node that had left, for all writers to find."""
    calls: list[int] = []
    ours: CollectsRequests
    if kind == "dir":
        ours = DirectoryBackend(tmp_path)
        unlink = Path.unlink

        def fail_unlink(path: Path, missing_ok: bool = False) -> None:
            if path.parent.name == "requests" and fails_once(calls):
                raise OSError(5, "Input/output error")
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", fail_unlink)
    else:
        store = ObjectStoreBackend("memory://combined-writes")
        delete = store._objects.delete

        def fail_delete(name: str) -> None:
            if fails_once(calls):
                raise StoreFailed("503")
            delete(name)

        monkeypatch.setattr(store._objects, "delete", fail_delete)
        ours = store
    ours.request("a", "join")
    with pytest.raises(BackendFailed):
        ours.request("a", "")
    ours.request("a", "")
    assert ours.requests() == {}


@pytest.mark.parametrize("kind", ["dir", "object store"])
def test_a_live_node_removes_what_a_dead_one_has_requested(kind: str, tmp_path: Path) -> None:
    """Nobody else would, and a writer that does not know of the death would find it."""
    made: list[CollectsRequests] = [
        DirectoryBackend(tmp_path) if kind == "dir" else ObjectStoreBackend("memory://of-the-dead")
        for _ in range(2)
    ]
    made[0].request("de,ad [1]", "join")
    made[0].request("de", "join")
    made[1].request("de,ad [1]", "")
    assert made[1].requests() == {"de": "join"}


LONG_NAME = "l" * 250  # with the rest of a request it is too long for the name of a file


def nodes_of_long_address(folder: Path, clock: FakeClock) -> list[Rendezvous]:
    """Two nodes in generation 1 of a group that combines its writes, in a folder."""
    policy = GroupPolicy(min_nodes=2, max_nodes=17, last_call_s=0.0, timeout_s=600.0)
    backends = [DirectoryBackend(folder, clock) for _ in range(2)]
    nodes = [
        Rendezvous(
            backend,
            Node(id=f"n{number}", address=LONG_NAME, nproc=1),
            policy,
            keep_alive_s=KEEP_ALIVE_S,
            clock=clock,
            open_endpoint=lambda: "h:1",
        )
        for number, backend in enumerate(backends)
    ]
    entered: set[int] = set()
    for _ in range(1000):
        clock.sleep(0.1)
        for number, (node, backend) in enumerate(zip(nodes, backends, strict=True)):
            backend.beat(f"n{number}")
            if number not in entered and node.poll_join() is not None:
                entered.add(number)
        if len(entered) == len(nodes):
            return nodes
    pytest.fail("no generation was formed")


def test_nodes_whose_requests_are_too_long_for_a_file_name_complete_the_run(tmp_path: Path) -> None:
    """An address may be as long as a name of the domain name system."""
    clock = FakeClock()
    nodes = nodes_of_long_address(tmp_path, clock)
    for node in nodes:
        node.done()
    ended = nodes[0].watch().ended
    assert ended is not None and ended.exit_code == 0


def test_a_node_whose_requests_are_too_long_for_a_file_name_leaves(tmp_path: Path) -> None:
    """It was to take its request back first, which there never was."""
    clock = FakeClock()
    nodes = nodes_of_long_address(tmp_path, clock)
    group = nodes[1].leave()
    assert group.member_ids == {"n0"}


@pytest.mark.parametrize("verb", list(Verb))
def test_a_request_of_any_kind_that_cannot_be_left_is_due_at_once_and_taken_back(
    verb: Verb, tmp_path: Path
) -> None:
    """The node writes for itself then. Where the removal fails at each try, it cannot go on."""
    clock, me = FakeClock(), Node(id="a", address=LONG_NAME, nproc=1)
    policy = GroupPolicy(min_nodes=1, max_nodes=17, last_call_s=0.0, timeout_s=600.0)
    rendezvous = Rendezvous(
        DirectoryBackend(tmp_path, clock),
        me,
        policy,
        keep_alive_s=KEEP_ALIVE_S,
        clock=clock,
        open_endpoint=lambda: "h:1",
    )
    combiner = rendezvous._writer._combiner
    group = Group()
    wanted = Request(verb=verb, node=me, generation=0, settings=settings_digest(None))
    assert combiner.request(group, wanted)
    combiner.cancel()
    assert not combiner.is_joining


def test_a_request_in_a_folder_of_another_user_is_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be neither left nor removed there."""
    ours = DirectoryBackend(tmp_path)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(BackendFailed):
        ours.request("a", "join")
    ours.request("a", "")
