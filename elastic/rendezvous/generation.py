"""A generation gives each of its nodes a place: which ranks its workers have, and where to meet."""

from dataclasses import dataclass

from elastic.rendezvous.group import Group, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The generation that this node has entered.

    `world_size` counts the workers of all members, `base_rank` is the rank of this node's first.
    `committed_step`: of the newest checkpoint that the group knows of.
    """

    number: int
    members: tuple[Node, ...]
    rank_of_node: int
    endpoint: str
    cause: str
    restarts: int
    world_size: int
    base_rank: int
    committed_step: int = 0

    @staticmethod
    def of(group: Group, me: Node) -> "Generation":
        """The place of `me` in the open generation, of which it is a member."""
        assert group.endpoint is not None, "an open generation has an endpoint"
        rank = [node.id for node in group.members].index(me.id)
        return Generation(
            number=group.generation,
            members=group.members,
            rank_of_node=rank,
            endpoint=group.endpoint,
            cause=group.cause,
            restarts=group.restarts,
            world_size=sum(node.nproc for node in group.members),
            base_rank=sum(node.nproc for node in group.members[:rank]),
            committed_step=group.committed_step,
        )
