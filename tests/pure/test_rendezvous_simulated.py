"""Several nodes and one fake clock, without threads: real Rendezvous objects are polled in turns.

The files in tests/scenarios/rendezvous hold commands and what must follow from them.
"""

from itertools import pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rendezvous_world import POLL_S, WideBackend, World, other_settings, parsed

from elastic.rendezvous import group_writer, observer, transitions
from elastic.rendezvous.membership import GroupPolicy
from elastic.testing.fakes import MemoryBackend

SCENARIOS = Path(__file__).parents[1] / "scenarios" / "rendezvous"


def run_scenario(text: str) -> str:
    """Replay the commands of a scenario; what happens takes the place of its `>` lines."""
    lines: list[str] = []
    world: World | None = None
    for line in text.splitlines():
        if line.startswith(">"):
            continue
        lines.append(line)
        command, *words = line.split() or ["#"]
        if command == "#":
            continue
        if command == "policy":
            options = dict(word.split("=") for word in words)
            policy = GroupPolicy(
                min_nodes=int(options["min"]),
                max_nodes=int(options["max"]),
                last_call_s=float(options["last_call"]),
                timeout_s=float(options["timeout"]),
            )
            world = World(policy=policy, keep_alive_s=float(options["keep_alive"]))
            continue
        assert world is not None, "a scenario begins with its policy"
        lines += _run_command(world, command, words)
    return "\n".join(lines) + "\n"


def _run_command(world: World, command: str, words: list[str]) -> list[str]:
    match command:
        case "start":
            for name in words:
                world.start(name)
        case "start-with":
            world.start(words[0], other_settings(world.settings, words[1:]))
        case "kill":
            world.kill(words[0])
        case "freeze" | "wake":
            world.machines[words[0]].is_frozen = command == "freeze"
        case "cut" | "deafen" | "mute":
            world.deaf |= set(words if command != "mute" else ())
            world.mute |= set(words if command != "deafen" else ())
        case "heal":
            world.deaf.clear()
            world.mute.clear()
        case "slow":
            world.machines[words[0]].stops_in = int(words[1])
        case "leave":
            world.leave(words[0])
        case "withdraw":
            world.withdraw(words[0], is_shared=words[1:] != ["alone"])
        case "contradict":
            world.contradict(words[0])
        case "fail":
            world.fail(words[0], step=int(words[1]))
        case "done":
            world.machines[words[0]].rendezvous.done()
        case "tick":
            world.tick(float(words[0]))
        case "show":
            return world.show()
        case _:
            raise ValueError(f"unknown command {command}")
    return []


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario_happens_as_written(path: Path) -> None:
    """The commands of the file run against real Rendezvous objects; the whole text is compared."""
    assert run_scenario(path.read_text()) == path.read_text()


def test_there_are_scenarios() -> None:
    """Otherwise the test above would pass on an empty folder."""
    assert len(list(SCENARIOS.glob("*.txt"))) >= 7


class Nodes(RuleBasedStateMachine):
    """Anything happens to up to five nodes in any order; each event checks the group and nodes."""

    most = 3  # members
    backend: type[MemoryBackend] = MemoryBackend
    slowness = 1  # how many times longer the group takes to come to rest

    def __init__(self) -> None:
        super().__init__()
        self.world, self.started = self.new_world(), 0

    def new_world(self) -> World:
        return World(
            policy=GroupPolicy(min_nodes=1, max_nodes=self.most, last_call_s=1.0, timeout_s=1e9),
            keep_alive_s=2.0,
            backend=self.backend(),
        )

    def pick(self, data: st.DataObject, names: list[str]) -> str:
        return data.draw(st.sampled_from(sorted(names)))

    @precondition(lambda self: len(self.world.machines) < 5)
    @rule()
    def start(self) -> None:
        self.started += 1
        self.world.start(f"n{self.started}")

    @precondition(lambda self: len(self.world.machines) < 5)
    @rule(words=st.sampled_from([["run=2"], ["uid=2"], ["keep_alive=3"]]))
    def start_stranger(self, words: list[str]) -> None:
        self.started += 1
        self.world.start(f"s{self.started}", other_settings(self.world.settings, words))

    @precondition(lambda self: self.world.machines)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        self.world.kill(self.pick(data, list(self.world.machines)))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.world.leave(self.pick(data, list(self.world.running)))

    @precondition(lambda self: any(m.generation for m in self.world.running.values()))
    @rule(data=st.data(), is_shared=st.booleans())
    def withdraw(self, data: st.DataObject, is_shared: bool) -> None:
        """A node is told to leave, and takes its time to save; `leave` may follow."""
        inside = [name for name, m in self.world.running.items() if m.generation is not None]
        name = self.pick(data, inside)
        self.world.withdraw(name, is_shared=is_shared)
        if name in self.world.machines:
            is_hidden = self.world.deaf | self.world.mute  # a partition does not wait for it
            self.world.machines[name].holds &= name in self.world.group.member_ids and not is_hidden

    @precondition(lambda self: any(m.generation for m in self.world.running.values()))
    @rule(data=st.data(), seconds=st.sampled_from([0.0, POLL_S, 2.5]))
    def contradict(self, data: st.DataObject, seconds: float) -> None:
        """A node that leaves finds two states of one step: no other node of the run goes on, in
        whichever generation it is by then. The rest happens to another group.
        """
        inside = [name for name, m in self.world.running.items() if m.generation is not None]
        name = self.pick(data, inside)
        self.world.withdraw(name, is_shared=True)
        self.world.tick(seconds)
        if name not in self.world.machines:
            return
        settings, is_its = self.world.given[name], self.world.group.settings == self.world.given[name]
        for machine in self.world.machines.values():
            machine.is_frozen, machine.stops_in = False, 0
        self.world.contradict(name)
        if is_its and name in self.world.machines:
            self.world.tick(2.0)
            others = [m for n, m in self.world.running.items() if self.world.given[n] == settings]
            assert all(machine.is_leaving for machine in others), [str(machine) for machine in others]
        self.world = self.new_world()

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        machine = self.world.machines[self.pick(data, list(self.world.running))]
        machine.is_frozen, machine.holds = True, False

    @precondition(lambda self: any(m.is_frozen for m in self.world.machines.values()))
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        """A node that wakes polls first. If the group went on, that poll must fence it."""
        frozen = [name for name, m in self.world.machines.items() if m.is_frozen]
        machine = self.world.machines[self.pick(data, frozen)]
        machine.is_frozen = False
        if machine.generation is None:
            return
        watch, group = machine.rendezvous.watch(), self.world.group
        if machine.generation.number < group.generation:
            before = self.world.backend.history()
            assert watch.fenced and not watch.open
            machine.rendezvous.close(transitions.FAILURE, step=99, counts=True)
            machine.rendezvous.done()
            assert self.world.backend.history() == before, "a fenced node changed the group"

    @precondition(lambda self: self.world.machines)
    @rule(data=st.data(), which=st.sampled_from(["deaf", "mute", "both"]))
    def cut(self, data: st.DataObject, which: str) -> None:
        name = self.pick(data, list(self.world.machines))
        for machine in self.world.machines.values():
            machine.holds = False
        if which != "mute":
            self.world.deaf.add(name)
        if which != "deaf":
            self.world.mute.add(name)

    @precondition(lambda self: self.world.deaf | self.world.mute)
    @rule()
    def heal(self) -> None:
        self.world.deaf.clear()
        self.world.mute.clear()

    @precondition(lambda self: self.world.machines)
    @rule(data=st.data(), polls=st.integers(0, 6))
    def slow(self, data: st.DataObject, polls: int) -> None:
        """From now on its workers take so many polls to stop."""
        self.world.machines[self.pick(data, list(self.world.machines))].stops_in = polls

    @rule(data=st.data(), step=st.integers(0, 5))
    def fail(self, data: st.DataObject, step: int) -> None:
        inside = [name for name, m in self.world.running.items() if m.generation is not None]
        if inside:
            self.world.fail(self.pick(data, inside), step)

    @rule(seconds=st.sampled_from([POLL_S, 1.0, 2.5]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(data=st.data())
    def poll_one(self, data: st.DataObject) -> None:
        """Nodes do not poll in step: one acts while the clock stands still."""
        if self.world.running:
            self.world.poll(self.pick(data, list(self.world.running)))

    @precondition(lambda self: self.world.staying)
    @rule()
    def settle(self) -> None:
        """The network heals and nothing else happens for a while: then all live nodes are members,
        except spares beyond the limit, and the group is at rest.
        """
        self.heal()
        self.all_have_left()
        keep_alive_s = self.longest_keep_alive_s
        self.world.tick(self.slowness * 3 * keep_alive_s + self.pause_s + 10 * POLL_S)
        if not self.is_any_left():
            return
        group, running = self.world.group, set(self.world.running)
        assert group.open, group
        assert not group.reports
        assert group.member_ids <= running, "a dead node is a member"
        assert len(group.members) == min(len(running), self.world.policy.max_nodes)
        assert group.member_ids | group.waiting_ids == running
        for name, machine in self.world.running.items():
            assert (machine.generation is not None) == (name in group.member_ids)
        self.world.tick(2 * keep_alive_s)
        assert self.world.group == group

    @precondition(lambda self: self.world.staying and self.world.deaf | self.world.mute)
    @rule()
    def settle_cut(self) -> None:
        """Nothing changes for a while, and the network stays broken as it is: then the group is at
        rest, and no two members that once reached each other are cut off from each other.
        """
        self.all_have_left()
        keep_alive_s = self.longest_keep_alive_s
        self.world.tick(self.slowness * 6 * keep_alive_s + self.pause_s + 10 * POLL_S)
        if not self.is_any_left():
            return
        group = self.world.group
        assert group.open, group
        self.world.tick(4 * keep_alive_s)
        assert self.world.group == group
        for one, other in permutations(group.member_ids, 2):
            have_met = one in self.world.probes[other].counters
            is_cut = not (self.world.reach(one, other) and self.world.reach(other, one))
            assert not (have_met and is_cut), f"{one} and {other} do not reach each other"

    @invariant()
    def generations_only_grow_and_one_opens_at_a_time(self) -> None:
        groups = [parsed(value) for value in self.world.backend.history()]
        for before, after in pairwise(groups):
            is_next = after.generation != before.generation
            opens = after.open and is_next
            assert after.generation == before.generation + is_next
            is_another_run = after.cause == transitions.NEW_RUN and not after.members
            assert opens or is_another_run or not is_next
            assert not (before.open and opens), "a generation opened before the last was closed"
            if before.open and after.open:
                assert before.members == after.members, "an open generation changed its members"

    @invariant()
    def a_group_has_only_nodes_with_its_settings(self) -> None:
        for group in map(parsed, self.world.backend.history()):
            for node in (*group.members, *group.waiting):
                assert self.world.given[node.id] == group.settings, node.id

    @property
    def longest_keep_alive_s(self) -> float:
        return max(self.world.given[name].keep_alive_s for name in self.world.machines)

    @property
    def pause_s(self) -> float:
        """How long the next generation waits: for stragglers, and after failures in a row."""
        return self.world.policy.last_call_s + transitions.restart_pause_s(self.world.group)

    def is_any_left(self) -> bool:
        """A stranger's sign of life refuses a node, and the stranger may have died since."""
        ends = [machine.over for machine in self.world.machines.values() if machine.over is not None]
        if not self.world.staying:
            assert any(end.startswith("UsageError 2: ") for end in ends), ends
        return bool(self.world.staying)

    def all_have_left(self) -> None:
        """Those that save have saved."""
        for name in [name for name, machine in self.world.running.items() if machine.is_leaving]:
            self.world.leave(name)

    @invariant()
    def no_generation_opens_without_a_state_that_one_node_alone_has(self) -> None:
        """It keeps its place until it has saved it, and the next generation waits for it."""
        holders = [name for name, machine in self.world.machines.items() if machine.holds]
        assert not (holders and self.world.group.open), holders

    @invariant()
    def members_believe_what_was_formed(self) -> None:
        """A node that believes to be in a generation was formed into it, with that rank."""
        formed = {g.generation: g.members for g in map(parsed, self.world.backend.history()) if g.open}
        for name, machine in self.world.machines.items():
            if machine.generation is not None:
                assert machine.generation.members == formed[machine.generation.number]
                assert machine.generation.members[machine.generation.rank_of_node].id == name


TestNodes = Nodes.TestCase
TestNodes.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class WideNodes(Nodes):
    """The same happens to nodes that take three for a crowd: each watches one other, and they
    combine their writes. Requests and answers are lost, and writers die before or after a write.
    """

    most = 4
    backend = WideBackend
    slowness = 2
    all_watch_all = 2

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(group_writer, "COMBINES_FROM", 3)
        self.patch.setattr(observer, "ALL_WATCH_ALL", self.all_watch_all)
        self.patch.setattr(observer, "WATCHED", 1)

    def teardown(self) -> None:
        self.patch.undo()

    @property
    def flaws(self) -> WideBackend:
        assert isinstance(self.world.backend, WideBackend)
        return self.world.backend

    @precondition(lambda self: len(self.world.machines) < 8)
    @rule(count=st.integers(1, 4))
    def start_many(self, count: int) -> None:
        for _ in range(count):
            self.start()

    @rule(when=st.sampled_from(["before", "after"]))
    def next_writer_dies(self, when: str) -> None:
        self.flaws.dies = when

    @rule(count=st.integers(1, 3))
    def answers_are_lost(self, count: int) -> None:
        self.flaws.lost_answers = count

    @rule(count=st.integers(1, 3))
    def requests_are_left_without_an_answer(self, count: int) -> None:
        self.flaws.lost_requests = count

    @rule()
    def requests_grow_old(self) -> None:
        """A listing shows from now on what it shows now."""
        self.flaws.old_texts = MemoryBackend.shown(self.flaws)

    @rule(refuses=st.booleans())
    def requests_are_refused(self, refuses: bool) -> None:
        self.flaws.refuses = refuses

    @precondition(lambda self: self.world.group.members)
    @rule(data=st.data())
    def a_node_and_all_that_watch_it_die(self, data: st.DataObject) -> None:
        nodes = self.world.group.member_ids | self.world.group.waiting_ids
        watched = self.pick(data, list(nodes))
        for name in nodes:
            if name == watched or watched in observer.watched_by(name, nodes):
                self.world.machines.pop(name, None)

    @precondition(lambda self: self.world.staying)
    @rule()
    def settle(self) -> None:
        self.heal_requests()
        if self.world.staying:
            super().settle()

    @precondition(lambda self: self.world.staying and self.world.deaf | self.world.mute)
    @rule()
    def settle_cut(self) -> None:
        self.heal_requests()
        if self.world.staying:
            super().settle_cut()

    def heal_requests(self) -> None:
        self.flaws.dies, self.flaws.lost_answers, self.flaws.old_texts = "", 0, None
        self.flaws.lost_requests = 0


class CombiningNodes(WideNodes):
    """The same of a group in which all watch all."""

    all_watch_all = 16


TestWideNodes = WideNodes.TestCase
TestWideNodes.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

TestCombiningNodes = CombiningNodes.TestCase
TestCombiningNodes.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
