"""The seam to what watches an agent, which lies above the agent and is never waited for."""

from contextlib import suppress
from typing import Protocol

from elastic.agent.parts import AgentParts
from elastic.agent.settings import Settings


class Monitor(Protocol):
    """`start` and `stop` neither raise, nor wait for longer than a moment."""

    def start(self, parts: AgentParts) -> None:
        """The agent is about to run."""

    def catch_up(self, settings: Settings) -> str:
        """In place of `start`, where the run has finished before: make up for what is missing.

        Returns a sentence for the console, empty for none. May raise OSError.
        """

    def stop(self) -> None:
        """The run has ended for this node, and its files hold how."""


class Monitors:
    """Any number of them, none included. One that fails costs its own service, and no training."""

    def __init__(self, *monitors: Monitor) -> None:
        self._monitors = monitors

    def start(self, parts: AgentParts) -> None:
        for each in self._monitors:
            try:
                each.start(parts)
            except Exception as error:  # no thread is left, for instance
                parts.console.print_line(
                    f"this agent is not watched by {type(each).__name__} ({error}); training goes on"
                )

    def catch_up(self, settings: Settings) -> str:
        found = []
        for each in self._monitors:
            try:
                found.append(each.catch_up(settings))
            except Exception as error:  # what a disk and a library may raise; the run has finished
                found.append(f"{type(each).__name__} could not make up for what is missing ({error})")
        return "; ".join(filter(None, found))

    def stop(self) -> None:
        for each in self._monitors:
            with suppress(Exception):  # the run is over, and its exit code must not change
                each.stop()
