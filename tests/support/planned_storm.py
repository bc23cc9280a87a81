"""Nodes come, go as planned and fail in a random storm, and none dies: then no state is ever lost.

Any node may be told to leave at any moment, also while it waits between two generations, and many
at once. The newest state is that of the last generation that made a step. A node that leaves gives
its place up at once only to others that have it; else it takes its time to save it.
"""

import random
from collections.abc import Callable
from functools import partial

from group_storm import POLL_S, Machine, Storm

from elastic.rendezvous import transitions

FAULTS = 25


class PlannedStorm:
    """`told`: what happened, for a person who reads a failure."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.size = self.draw.choice((1, 2, 3, 8, 18, 24))
        self.storm = Storm(seed, self.size, None, self.draw.choice((0, 1, 2, 4)), self.draw.choice((3, 17)))
        self.told: list[str] = []
        self.committed = 0  # the generation whose last state was saved

    def play(self) -> None:
        """Raises AssertionError where something does not hold."""
        storm = self.storm
        storm.sleep(self.draw.choice((2.0, 5.0)))
        for _ in range(FAULTS):
            faults = [self.start, self.lag, self.answers_get_lost]
            if storm.staying:
                faults += [self.leave, self.leave, self.leave_many, self.slow_node]
            if storm.training:
                faults += [self.fail]
            fault: Callable[[], None] = self.draw.choice(faults)
            self.told.append(f"{storm.now:8.2f} {fault.__name__}")
            fault()
            storm.sleep(self.draw.choice((0.02, 0.1, 0.3, 1.0, 3.0)))
            self.check()
        for machine in storm.machines.values():
            machine.door.lag_s, machine.door.lost_answers = 0.0, 0
        storm.sleep(40.0)
        self.check()
        assert len(storm.training) == min(len(storm.staying), self.size), "not at rest"

    def check(self) -> None:
        """The newest state is committed, or a node has it that is there."""
        newest = self.storm.trained
        there = max((machine.trained for machine in self.storm.machines.values()), default=0)
        assert max(there, self.committed) == newest, f"the state of generation {newest} is lost"
        holders = {name for name, m in self.storm.machines.items() if m.trained == newest > self.committed}
        group = self.storm.group
        if group.open and holders:
            assert holders & group.member_ids, f"generation {group.generation} begins without {holders}"

    # What happens.

    def start(self) -> None:
        for _ in range(self.draw.choice((1, 1, 3))):
            if len(self.storm.machines) < self.size + 5:
                self.storm.start()

    def leave(self) -> None:
        self._leave(self.draw.choice(self.storm.staying))

    def leave_many(self) -> None:
        names = self.storm.staying
        for name in self.draw.sample(names, self.draw.randint(1, len(names))):
            self.storm.later(self.draw.choice((0.0, 0.01, 0.1, 0.3)), partial(self._leave, name))

    def _leave(self, name: str) -> None:
        took_s = self.draw.choice((0.1, 1.0, 5.0))

        def withdraw(name: str, machine: Machine) -> None:
            machine.is_leaving, trained = True, machine.trained
            others = machine.rendezvous.withdraw(lambda number: not trained or number == trained).others_go_on
            machine.generation = None
            if not others:
                machine.holds = bool(trained) and name in self.storm.group.member_ids
            self.storm.later(took_s, lambda: self._go(name, machine, saves=not others))

        if name in self.storm.staying:
            self.storm.call(name, withdraw)

    def _go(self, name: str, machine: Machine, *, saves: bool) -> None:
        if self.storm.machines.get(name) is not machine:
            return

        def leave(name: str, machine: Machine) -> None:
            if saves:
                self.committed = max(self.committed, machine.trained)
            machine.holds = False
            machine.rendezvous.leave()
            del self.storm.machines[name]

        self.storm.call(name, leave)
        self.storm.later(1.0, lambda: self._go(name, machine, saves=saves))

    def fail(self) -> None:
        def close(_name: str, machine: Machine) -> None:
            machine.rendezvous.close(transitions.FAILURE, step=0, counts=False)
            machine.generation = None

        self.storm.call(self.draw.choice(self.storm.training), close)

    def lag(self) -> None:
        for machine in self.storm.machines.values():
            machine.door.lag_s = self.draw.choice((0.0, 0.0, 0.1, 0.4))

    def answers_get_lost(self) -> None:
        for machine in self.storm.machines.values():
            machine.door.lost_answers = self.draw.choice((0, 0, 1, 3))

    def slow_node(self) -> None:
        machine = self.draw.choice(list(self.storm.machines.values()))
        machine.pace_s = self.draw.choice((0.02, POLL_S, 0.8))
        machine.stops_in = self.draw.randint(0, 4)
