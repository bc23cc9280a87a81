"""The seam to what watches an agent, which lies above the agent and is never waited for."""

from typing import Protocol

from elastic.agent.actions import AgentParts


class Monitor(Protocol):
    """Neither call raises, nor waits for longer than a moment."""

    def start(self, parts: AgentParts) -> None:
        """The agent is about to run."""

    def stop(self) -> None:
        """The run has ended for this node, and its files hold how."""


class Monitors:
    """Any number of them, none included."""

    def __init__(self, *monitors: Monitor) -> None:
        self._monitors = monitors

    def start(self, parts: AgentParts) -> None:
        for each in self._monitors:
            each.start(parts)

    def stop(self) -> None:
        for each in self._monitors:
            each.stop()
