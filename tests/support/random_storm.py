"""Random faults of a simulated group: what happens is drawn from the seed, and then it is calm."""

import random
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

from group_storm import KEEP_ALIVE_S, POLL_S, Machine, Storm

from elastic.errors import EXIT_FAILED
from elastic.rendezvous import group_writer, observer, transitions
from elastic.rendezvous.group import RunEnd, RunKey

FAULTS = 15
LEAVE_S = 7.0  # nodes that leave have saved by then
SETTLED_S = 12 * KEEP_ALIVE_S
REST_S = 3 * KEEP_ALIVE_S
PUT_BACK_S = 1.5  # in which a node that lives puts back what it has read


class RandomStorm:
    """`told`: what happened, for a person who reads a failure."""

    first_s: tuple[float, ...] = (1.0, 5.0)  # how long until the first fault, and between two
    pauses_s: tuple[float, ...] = (0.05, 0.3, 1.0, 3.0, 6.0)
    count = FAULTS
    sizes: tuple[int, ...] = (3, 8, 17, 30, 50)
    ends: tuple[str, ...] = ()  # what may end a node by itself

    def __init__(self, seed: int, folder: Path) -> None:
        """folder: an empty one, which some storms meet in."""
        self.draw = random.Random(seed)
        self.size = self.draw.choice(self.sizes)
        meets = folder if self.draw.random() < 0.5 else None
        self.storm = Storm(seed, self.size, meets, spares=self.draw.choice((0, 0, 1, 3)))
        self.step = self.committed = self.saved = 0
        there = "a folder" if meets else "memory"
        self.told = [f"{len(self.storm.machines)} nodes for {self.size} places meet in {there}"]

    def play(self) -> None:
        """Raises AssertionError where something does not hold."""
        self.storm.sleep(self.draw.choice(self.first_s))
        for _ in range(self.count):
            fault: Callable[[], None] = self.draw.choice(self.faults())
            self.told.append(f"{self.storm.now:8.2f} {fault.__name__}")
            fault()
            self.storm.sleep(self.draw.choice(self.pauses_s))
            self.look()
        self.calm()

    def look(self) -> None:
        if self.draw.random() < 0.1:
            self.calm()

    def faults(self) -> list[Callable[[], None]]:
        """Those that are possible now; one that stands here twice is drawn twice as often."""
        storm, faults = self.storm, [self.start, self.start]
        if storm.live:
            faults += [self.kill, self.freeze, self.wake, self.slow_node, self.away, self.back]
            faults += [self.slow_network, self.cut, self.heal, self.lag, self.answers_get_lost]
        if len(storm.live) > 1:
            faults += [self.kill_many, self.kill_all]
        if storm.training:
            faults += [self.fail, self.commit, self.hand_over, self.hand_over]
        if storm.folder is not None and self._all_know():
            faults += [self.lose] * 2
        return faults

    # Nodes.

    def start(self) -> None:
        for _ in range(self.draw.choice((1, 1, 2, 10))):
            if len(self.storm.machines) < self.size + 5:
                self.storm.start()

    def kill(self) -> None:
        del self.storm.machines[self.draw.choice(list(self.storm.machines))]

    def kill_many(self) -> None:
        there = list(self.storm.machines)
        for name in self.draw.sample(there, max(1, len(there) // self.draw.choice((2, 5, 10)))):
            del self.storm.machines[name]

    def kill_all(self) -> None:
        """A power cut."""
        number = len(self.storm.machines)
        self.storm.machines.clear()
        for _ in range(self.draw.randint(1, number)):
            self.storm.start()

    def freeze(self) -> None:
        machine = self._machine(self.storm.live)
        machine.is_frozen, machine.holds = True, False

    def wake(self) -> None:
        """Where the group went on without a node, that node changes nothing any more."""

        def act(_name: str, machine: Machine) -> None:
            before = len(self.storm.written)
            machine.rendezvous.close(transitions.FAILURE, step=99, counts=True)
            machine.rendezvous.done()
            assert len(self.storm.written) == before, "a fenced node changed the group"

        for name, machine in self.storm.machines.items():
            is_behind = machine.newest < self.storm.group.generation and machine.generation is not None
            if machine.is_frozen and is_behind and not machine.door.lag_s:
                self.storm.call(name, act)
            machine.is_frozen = False

    def slow_node(self) -> None:
        machine = self._machine(self.storm.live)
        machine.pace_s, machine.stops_in = self.draw.choice((POLL_S, 0.02, 1.0)), self.draw.randint(0, 6)

    def fail(self) -> None:
        """The step of this failure is always a new one, so that no pause follows."""
        self.step += 1

        def close(_name: str, machine: Machine) -> None:
            machine.rendezvous.close(transitions.FAILURE, step=self.step, counts=True)
            machine.generation = None

        self.storm.call(self.draw.choice(self.storm.training), close)

    def commit(self) -> None:
        def report(_name: str, machine: Machine) -> None:
            found = machine.rendezvous.report_commit(self.committed + 1)
            self.committed = found.committed_step

        self.storm.call(self.draw.choice(self.storm.training), report)

    def hand_over(self) -> None:
        is_kept, took_s = self.draw.random() < 0.7, self.draw.choice((0.1, 1.0, 5.0))
        self.withdraw(self.draw.choice(self.storm.staying), took_s, is_kept=is_kept)

    def withdraw(self, name: str, took_s: float, *, is_kept: bool) -> None:
        """A node leaves, also one that waits, and saves what it has, if no other node has it."""

        def withdraw(name: str, machine: Machine) -> None:
            machine.is_leaving = True
            self.storm.later(took_s, lambda: self._leave(name, machine))
            was_member = name in self.storm.group.member_ids
            trained, machine.generation = machine.trained, None
            others = machine.rendezvous.withdraw(
                lambda number: not trained or (is_kept and number == trained)
            )[0]
            machine.saves = not others
            machine.holds = bool(trained) and was_member and not others and self._is_whole()

        self.storm.call(name, withdraw)

    def _leave(self, name: str, machine: Machine) -> None:
        if self.storm.machines.get(name) is not machine:
            return

        def leave(name: str, machine: Machine) -> None:
            self.saved = max(self.saved, machine.trained if machine.saves else 0)
            machine.holds = False
            machine.rendezvous.leave()
            del self.storm.machines[name]

        if not machine.is_frozen:
            self.storm.call(name, leave)
        self.storm.later(1.0, lambda: self._leave(name, machine))

    # The network.

    def slow_network(self) -> None:
        """Each direction of each link of some nodes has another delay."""
        names, longest_s = list(self.storm.machines), self.draw.choice((0.1, 0.5, 3.0))
        for one in self.draw.sample(names, self.draw.randint(0, len(names))):
            for other in names:
                for link in ((one, other), (other, one)):
                    self.storm.network.delays_s[link] = self.draw.uniform(0.0, longest_s)
        self.storm.network.lost = self.draw.choice((0.0, 0.0, 0.1, 0.3))
        self._hide()

    def cut(self) -> None:
        """Some nodes do not reach the others, are not reached by them, or both."""
        names = list(self.storm.machines)
        part = self.draw.sample(names, self.draw.choice((1, 1, len(names) // 3, len(names) // 2)))
        which = self.draw.choice(("out", "in", "both"))
        for one in part:
            for other in set(names) - set(part):
                self.storm.network.cut |= {(one, other)} if which != "in" else set()
                self.storm.network.cut |= {(other, one)} if which != "out" else set()
        self._hide()

    def heal(self) -> None:
        self.storm.network.heal()

    # The place to meet.

    def away(self) -> None:
        machine = self._machine(self.storm.live)
        machine.door.is_away, machine.holds = True, False

    def back(self) -> None:
        for machine in self.storm.machines.values():
            machine.door.is_away, machine.door.lag_s, machine.door.refuses = False, 0.0, False

    def lag(self) -> None:
        for machine in self.storm.machines.values():
            machine.door.lag_s = self.draw.choice((0.0, 0.1, 0.5))

    def answers_get_lost(self) -> None:
        for machine in self.storm.machines.values():
            machine.door.lost_answers = self.draw.choice((0, 0, 1, 3))

    def lose(self) -> None:
        """A person empties the folder, once there is something to lose."""
        if self.storm.training:
            self.commit()
            self.storm.sleep(1.0)
        if self._all_know() and self.storm.folder is not None:
            shutil.rmtree(self.storm.folder)
            self.storm.sleep(PUT_BACK_S)

    def _all_know(self) -> bool:
        """Whether all nodes have read the newest version, and can put it back."""
        newest = len(self.storm.written)
        return bool(newest and self.storm.machines) and all(
            machine.door.version == newest
            and not (machine.is_frozen or machine.is_leaving or machine.door.is_away)
            for machine in self.storm.machines.values()
        )

    # Rest.

    def _machine(self, names: list[str]) -> Machine:
        return self.storm.machines[self.draw.choice(names)]

    def _hide(self) -> None:
        """A node may be taken for dead now, and what it alone has does not count."""
        for machine in self.storm.machines.values():
            machine.holds = False

    def _is_whole(self) -> bool:
        network, doors = self.storm.network, [each.door for each in self.storm.machines.values()]
        return not (network.cut or network.delays_s or network.lost or any(door.is_away for door in doors))

    def calm(self) -> None:
        """The faults end, but for a network that may stay cut; then the group comes to rest."""
        storm = self.storm
        self.told.append(f"{storm.now:8.2f} calm")
        stays_cut = bool(storm.network.cut) and self.draw.random() < 0.3
        cut = set(storm.network.cut) if stays_cut else set()
        storm.network.heal()
        storm.network.cut = cut
        self.wake()
        self.back()
        for machine in storm.machines.values():
            machine.door.lost_answers = machine.door.lost_requests = 0
            machine.door.dies, machine.pace_s = "", POLL_S
        storm.sleep(LEAVE_S)
        if not storm.machines:
            storm.start()
        storm.sleep(SETTLED_S)
        self._check(cut)
        group = storm.group
        storm.sleep(REST_S)
        assert storm.group == group, "it does not come to rest"

    def _check(self, cut: set[tuple[str, str]]) -> None:
        assert all(end.startswith(self.ends) for end in self.storm.ends), self.storm.ends
        self.storm.check_history()
        group, live = self.storm.group, set(self.storm.machines)
        assert group.open, group
        assert group.committed_step >= self.committed, (group.committed_step, self.committed)
        assert group.member_ids | group.waiting_ids == live, "a dead node, or one that is missing"
        for name, machine in self.storm.machines.items():
            assert (machine.generation is not None) == (name in group.member_ids), name
        if not cut:
            assert not group.reports, group.reports
            assert len(group.members) == min(len(live), self.size)
        reached = {name for name in group.member_ids if self.storm.machines[name].probes.counters}
        apart = [link for link in cut if reached.issuperset(link)]
        assert not apart, f"members that do not reach each other: {apart}"


class SmallStorm(RandomStorm):
    """Few nodes, to which three are a crowd, in some storms so that each watches one other; and
    nodes of other runs.
    """

    pauses_s = (0.0, 0.05, 0.3, 1.0, 3.0)
    count = 30
    sizes = (2, 3, 4, 5)
    ends = ("UsageError 2: ",)
    STRANGERS: ClassVar = ((RunKey(run_id="2"), 2.0), (RunKey(uid="2"), 2.0), (RunKey(), 3.0))

    def play(self) -> None:
        watch_all = self.draw.choice((2, 16))
        with (
            patch.object(group_writer, "COMBINES_FROM", self.draw.choice((3, 7))),
            patch.object(observer, "ALL_WATCH_ALL", watch_all),
            patch.object(observer, "WATCHED", 1),
        ):
            super().play()
            self.contradict()

    def faults(self) -> list[Callable[[], None]]:
        faults = [each for each in super().faults() if each not in (self.commit, self.lose)]
        faults += [self.start_stranger, self.requests_get_lost, self.refuse, self.kill_with_watchers]
        return faults + [self.next_writer_dies] * bool(self.storm.live)

    def start_stranger(self) -> None:
        if len(self.storm.machines) < self.size + 5:
            self.storm.start(*self.draw.choice(self.STRANGERS))

    def next_writer_dies(self) -> None:
        self._machine(self.storm.live).door.dies = self.draw.choice(("before", "after"))

    def requests_get_lost(self) -> None:
        for machine in self.storm.machines.values():
            machine.door.lost_requests = self.draw.choice((0, 1, 3))

    def refuse(self) -> None:
        for machine in self.storm.machines.values():
            machine.door.refuses = self.draw.random() < 0.5

    def kill_with_watchers(self) -> None:
        nodes = self.storm.group.member_ids | self.storm.group.waiting_ids
        if nodes:
            watched = self.draw.choice(sorted(nodes))
            for name in nodes:
                if name == watched or watched in observer.watched_by(name, nodes):
                    self.storm.machines.pop(name, None)

    def contradict(self) -> None:
        """A node that leaves finds two states of one step: no other node of the run goes on, in
        whichever generation it is by then.
        """
        name = self.draw.choice(sorted(self.storm.training))
        self.withdraw(name, 60.0, is_kept=True)
        self.storm.sleep(self.draw.choice((0.0, POLL_S, 2.5)))
        run_end = RunEnd(exit_code=EXIT_FAILED, reason="two states of one step")
        self.storm.call(name, lambda _name, machine: machine.rendezvous.end(run_end, of_any=True))
        self.storm.sleep(2.0)
        assert not self.storm.training, [machine.generation for machine in self.storm.machines.values()]


class PlannedStorm(RandomStorm):
    """Nodes come, go as planned and fail, and none dies: then no state is ever lost.

    Any node may be told to leave at any moment, also while it waits between two generations, and
    many at once. The newest state is that of the last generation that made a step. A node that
    leaves gives its place up at once only to others that have it; else it takes its time to save it
    (`saved`: the generation whose last state was saved).
    """

    first_s = (2.0, 5.0)
    pauses_s = (0.02, 0.1, 0.3, 1.0, 3.0)
    count = 25

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        self.size = self.draw.choice((1, 2, 3, 8, 18, 24))
        self.storm = Storm(seed, self.size, None, self.draw.choice((0, 1, 2, 4)))

    def faults(self) -> list[Callable[[], None]]:
        faults = [self.start, self.lag, self.answers_get_lost]
        if self.storm.staying:
            faults += [self.leave, self.leave, self.leave_many, self.slow_node]
        return faults + [self.fail] * bool(self.storm.training)

    def look(self) -> None:
        """The newest state is saved, or a node has it that is there."""
        newest = self.storm.trained
        there = max((machine.trained for machine in self.storm.machines.values()), default=0)
        assert max(there, self.saved) == newest, f"the state of generation {newest} is lost"
        holders = {name for name, m in self.storm.machines.items() if m.trained == newest > self.saved}
        group = self.storm.group
        if group.open and holders:
            assert holders & group.member_ids, f"generation {group.generation} begins without {holders}"

    def calm(self) -> None:
        super().calm()
        self.look()

    def leave(self) -> None:
        self.withdraw_staying(self.draw.choice(self.storm.staying))

    def leave_many(self) -> None:
        names = self.storm.staying
        for name in self.draw.sample(names, self.draw.randint(1, len(names))):
            wait_s = self.draw.choice((0.0, 0.01, 0.1, 0.3))
            self.storm.later(wait_s, partial(self.withdraw_staying, name))

    def withdraw_staying(self, name: str) -> None:
        took_s = self.draw.choice((0.1, 1.0, 5.0))
        if name in self.storm.staying:
            self.withdraw(name, took_s, is_kept=True)


def play(seed: int, kind: type[RandomStorm] = RandomStorm) -> None:
    """Raises AssertionError, with what happened in the storm."""
    # In memory, where there is such a folder: nothing is lost there that a disk would keep.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        storm = kind(seed, Path(folder))
        try:
            storm.play()
        except BaseException as error:
            error.add_note("\n".join(storm.told))
            raise
