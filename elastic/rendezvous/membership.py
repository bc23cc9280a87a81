"""Who may be in a generation, from the group's state and the nodes that this node believes alive.

Nothing here changes the state: `transitions` does. Every function gives the same answer on every
node that reads the same state and believes the same nodes alive.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.partition import UnreachableReport, broken_by_node, nodes_to_exclude


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """Sizes of the group, the same on every node, and waiting times of this one.

    `last_call_s`: how long a generation without any previous member waits for stragglers once
    `min_nodes` wait. `timeout_s`: how long a node waits in a group that cannot form.
    `max_workers`: the largest world size, None for any.
    """

    min_nodes: int
    max_nodes: int
    last_call_s: float
    timeout_s: float
    max_workers: int | None = None


def lost_members(group: Group, *, alive: AbstractSet[str]) -> tuple[str, ...]:
    """The dead members of the open or closed generation; those that left are not among them."""
    return tuple(node.id for node in group.members if node.id not in alive)


def lost(group: Group, *, alive: AbstractSet[str]) -> tuple[str, ...]:
    """The dead nodes that the group names, for which it must change.

    Those are members, nodes that wait, and nodes that have reported others unreachable. Dead
    members of a closed generation go too: the next in rank watches few, and may not know that it is
    the first.

    A reporter may be neither a member nor waiting: an excluded node is out of the group for the
    time that its workers take to stop. If it dies then, its report must not stay and exclude
    others.
    """
    names = [*(node.id for node in (*group.members, *group.waiting)), *(each.node for each in group.reports)]
    return tuple(name for name in dict.fromkeys(names) if name not in alive)


def queue(group: Group, *, alive: AbstractSet[str]) -> tuple[Node, ...]:
    """The live waiting nodes that are not excluded, in the rank order of the next generation.

    Previous members keep their order, so that rank 0, its logs and its node stay where they are;
    the others follow in order of arrival.
    """
    left_out = excluded(group, alive=alive)
    waiting = {node.id: node for node in group.waiting if node.id in alive and node.id not in left_out}
    previous = {node.id: node for node in group.members if node.id in waiting}
    return (
        *(waiting[name] for name in previous),
        *(node for name, node in waiting.items() if name not in previous),
    )


def excluded(group: Group, *, alive: AbstractSet[str]) -> frozenset[str]:
    """The live nodes that cannot train because the network between them and members is broken.

    Of the members none is excluded that could stay (`partition.nodes_to_exclude`). A waiting
    newcomer is excluded if it has a broken link to a member that stays. So a newcomer never
    displaces a member. If it could, a newcomer with a bad link would end a generation in which all
    members reach each other, and the next newcomer would end that one: the group would close and
    form without end.

    The set is computed from the reports at every poll and stored nowhere. A stored list of excluded
    nodes was tried first. When several links broke in several ways and newcomers came, each node
    could undo what another had decided, and the group did not come to rest either (decision 0012).
    """
    if not group.reports:
        return frozenset()
    broken = broken_by_node(group.reports)
    members = tuple(node.id for node in group.members if node.id in alive)
    left_out = frozenset(nodes_to_exclude(members, group.reports))
    stay = frozenset(members) - left_out
    others = alive & (group.waiting_ids - group.member_ids)
    return left_out | {name for name in others if not stay.isdisjoint(broken.get(name, ()))}


def admitted(
    nodes: tuple[Node, ...], *, reports: tuple[UnreachableReport, ...], policy: GroupPolicy
) -> tuple[Node, ...]:
    """Those of `nodes` that fit and reach each other, in the given order.

    A node that is too large is skipped: it does not hold up a smaller one behind it.
    """
    chosen: list[Node] = []
    workers, broken, cut_off = 0, broken_by_node(reports), set[str]()
    for node in nodes:
        fits = policy.max_workers is None or workers + node.nproc <= policy.max_workers
        if len(chosen) < policy.max_nodes and fits and node.id not in cut_off:
            chosen.append(node)
            workers += node.nproc
            cut_off |= broken.get(node.id, set())
    return tuple(chosen)


def next_members(group: Group, *, alive: AbstractSet[str], policy: GroupPolicy) -> tuple[Node, ...]:
    return admitted(queue(group, alive=alive), reports=group.reports, policy=policy)


def newcomers(group: Group, *, alive: AbstractSet[str], policy: GroupPolicy) -> tuple[Node, ...]:
    """The waiting nodes that a new generation would admit beside all live members of the open one.

    A spare beyond `max_nodes` or `max_workers` is not among them: to close the generation for it
    would be in vain. There are no newcomers while the members are partitioned, because the
    generation is about to close.
    """
    if not group.open or is_partitioned(group, alive=alive):
        return ()
    members = group.member_ids
    come = tuple(node for node in queue(group, alive=alive) if node.id not in members)
    if not come:
        return ()
    stay = tuple(node for node in group.members if node.id in alive)
    chosen = admitted((*stay, *come), reports=group.reports, policy=policy)
    return tuple(node for node in chosen if node.id not in members)


def continues(group: Group, nodes: tuple[Node, ...]) -> bool:
    """Whether `nodes` has a previous member: training stands still, so there is no last call."""
    members = group.member_ids
    return any(node.id in members for node in nodes)


def reported(group: Group) -> frozenset[str]:
    """All nodes that a report names, its author included.

    An excluded node is neither a member nor waiting while it stops its workers; these names are how
    the others keep watching it until it is back.
    """
    return frozenset(name for report in group.reports for name in (report.node, *report.peers))


def is_partitioned(group: Group, *, alive: AbstractSet[str]) -> bool:
    """Whether live members of the open generation have reported each other unreachable."""
    return group.open and not excluded(group, alive=alive).isdisjoint(group.member_ids)


def width(group: Group, policy: GroupPolicy) -> int:
    """How many nodes may want to write at once. Before a start's first generation the number is
    unknown, and `max_nodes` stands for it.
    """
    named = len(group.members) + len(group.waiting)
    return named if group.members else max(named, policy.max_nodes)
