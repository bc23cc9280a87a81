"""A thread of the agent of rank 0 keeps a renderer of the run's view up to date.

Neither the step loop nor the agent's loop waits for it. Other agents have no such renderer: one
that was cut off may believe that it has rank 0, and the files know better. With a run directory at
a URL the files are those of this node, and the view is what this node saw.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Protocol

from elastic.agent.parts import AgentParts
from elastic.events import GenerationStarted
from elastic.observe.logged_event import last
from elastic.observe.reader import RunReader
from elastic.observe.run_view import RunView, view_of
from elastic.observe.step_columns import StepBatch

POLL_S = 1.0
RETRY_S = 10.0
_LONGEST_S, _PAUSE_PER_COST = 15.0, 50.0  # so that looking takes a fiftieth of one core
_BREATH_S = 0.01  # after each part of a long file, which leaves the interpreter to the agent


class Renderer(Protocol):
    """Calls may raise any exception; then another one begins anew."""

    def add(self, steps: StepBatch) -> None:
        """The next steps, perhaps with some that came before."""

    def show(self, view: RunView) -> None:
        """All files were read to their ends."""

    def close(self) -> None: ...


class Follower:
    def __init__(self, name: str, open_renderer: Callable[[AgentParts], Renderer], *, problem: str) -> None:
        """problem: what a failure means for the user, in words."""
        self._name, self._open, self._problem = name, open_renderer, problem
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._reader: RunReader | None = None
        self._renderer: Renderer | None = None
        self._has_told = False
        self.failure = ""  # of the last look, if that failed
        self.looked_s = -inf  # when the last good one ended, on the monotonic clock

    def start(self, parts: AgentParts) -> None:
        self._thread = threading.Thread(target=self._work, args=[parts], name=self._name, daemon=True)
        self._thread.start()

    def stop(self, within_s: float) -> None:
        """End the thread in that time; it first shows what the run's files hold."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(within_s)

    def _work(self, parts: AgentParts) -> None:
        wait_s, is_last = 0.0, False
        while not is_last:
            is_last = self._ending.wait(wait_s)
            wait_s = self.try_look(parts)
        self._close()

    def try_look(self, parts: AgentParts) -> float:
        """Returns the seconds to wait before the next one."""
        began_s, told = parts.clock.monotonic(), self._has_told
        try:
            self._look(parts)
        # The edge of a thread: what it shows would stand still without a word.
        except Exception as error:
            self._close()
            self.failure, self._has_told = str(error), True
            if not told:
                parts.console.print_line(
                    f"{self._problem} ({error}); training goes on, and it is tried again"
                )
            return RETRY_S
        self.failure, self.looked_s = "", parts.clock.monotonic()
        return max(POLL_S, min(_LONGEST_S, _PAUSE_PER_COST * (self.looked_s - began_s)))

    def _look(self, parts: AgentParts) -> None:
        settings = parts.settings
        if not parts.group.is_first:
            self._close()
            return
        if self._reader is None or self._renderer is None:
            self._reader = RunReader(settings.run, node=settings.node, with_values=True)
            self._renderer = self._open(parts)
        start = last(self._reader.read_events(), GenerationStarted)
        if start is None or start.node != settings.node:
            self._close()
            return
        for batch in self._reader.new_steps():
            self._renderer.add(batch)
            if not self._ending.is_set():
                self._ending.wait(_BREATH_S)
        self._renderer.show(view_of(self._reader.record(), {settings.node: 0.0}))

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._renderer is not None:
            with suppress(Exception):  # a full disk, told by the look before
                self._renderer.close()
        self._reader = self._renderer = None
