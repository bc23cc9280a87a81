"""What one poll tells a node about the generation that its workers are in."""

from dataclasses import dataclass

from elastic.rendezvous.group import Node, RunEnd, WorkerFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """What one poll saw of the generation that this node entered last.

    `fenced`: the group went on without this node, which must stop its workers and join.
    `newcomers`: waiting nodes that a new generation would admit. `lost`: ids of members that were
    found dead. `cause` and `failure`: why the generation was closed, if neither `open` nor
    `fenced`.
    """

    open: bool
    fenced: bool
    newcomers: tuple[Node, ...]
    lost: tuple[str, ...]
    ended: RunEnd | None
    cause: str
    failure: WorkerFailure | None

    def reason(self, generation: int) -> str:
        """A sentence for the console; generation: the one that this node entered last."""
        if self.ended is not None:
            return f"the run has ended: {self.ended.reason}"
        if self.fenced:
            return f"generation {generation} is over and the group went on without this node"
        if self.lost:
            return f"{', '.join(self.lost)} of generation {generation} stopped answering"
        if not self.open:
            return f"generation {generation} was closed: {self.cause}"
        if self.newcomers:
            return f"{', '.join(n.id for n in self.newcomers)} can be admitted to the next generation after {generation}"
        return f"generation {generation} is training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """What follows for a node that withdraws.

    others_go_on: with its state; it has left. generation: the newest, in which the node keeps its
    place, so that the next one waits for it; None where it is not a member.
    """

    others_go_on: bool
    generation: int | None
