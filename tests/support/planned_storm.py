"""Nodes come, go as planned and fail in a random storm, and none dies: then no state is ever lost.

Any node may be told to leave at any moment, also while it waits between two generations, and many
at once. The newest state is that of the last generation that made a step. A node that leaves gives
its place up at once only to others that have it; else it takes its time to save it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from group_storm import Storm
from random_storm import RandomStorm


class PlannedStorm(RandomStorm):
    """`saved`: the generation whose last state was saved."""

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
        self._withdraw_staying(self.draw.choice(self.storm.staying))

    def leave_many(self) -> None:
        names = self.storm.staying
        for name in self.draw.sample(names, self.draw.randint(1, len(names))):
            wait_s = self.draw.choice((0.0, 0.01, 0.1, 0.3))
            self.storm.later(wait_s, partial(self._withdraw_staying, name))

    def _withdraw_staying(self, name: str) -> None:
        took_s = self.draw.choice((0.1, 1.0, 5.0))
        if name in self.storm.staying:
            self.withdraw(name, took_s, is_kept=True)
