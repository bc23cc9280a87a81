"""What a node does next, and what becomes of the group, are functions of values: group, node, who is alive, time.

A transition that names a generation changes nothing once the group has moved on: a node of the past cannot touch the
present. It does not promise that a transition takes effect: the shell must get it through compare-and-set, and looks again if not.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum, auto

from elastic.errors import EXIT_COMPLETE
from elastic.rendezvous.group import Failure, Group, Node, RunEnd
from elastic.rendezvous.partition import UnreachableReport, broken_links, nodes_to_exclude

START = "start"
RESUME = "resume"
NODE_LOST = "node lost"
NODE_LEFT = "node left"
NODE_JOINED = "node joined"
FAILURE = "failure"
CUT = "because the network between the others and me is cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """Sizes of the group and times, the same on every node.

    `last_call_s`: how long a generation that continues nobody's waits for stragglers once min is there.
    `timeout_s`: how long a node waits in a group that cannot form. `max_workers`: the most ranks, None for any number.
    """

    min_nodes: int
    max_nodes: int
    last_call_s: float
    timeout_s: float
    max_workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Readings of this node's own monotonic clock, in seconds; None: it is not so now."""

    now_s: float
    closed_since_s: float | None  # since when this node has been waiting in a group that is not open
    enough_since_s: float | None  # since when it has seen enough nodes waiting for a generation


class Action(Enum):
    JOIN = auto()
    FORM = auto()
    WAIT = auto()
    ENTER = auto()
    EVICT = auto()
    GIVE_UP = auto()
    STOP = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    action: Action
    reason: str


def decide(
    group: Group, me: Node, *, alive: AbstractSet[str], timing: Timing, policy: GroupPolicy
) -> Decision:
    """What `me`, whose workers are stopped, does about this group. `alive` holds the ids of all live nodes, mine included."""
    if group.ended is not None:
        return Decision(action=Action.STOP, reason=f"the run has ended: {group.ended.reason}")
    lost = lost_members(group, alive=alive) or lost_waiting(group, alive=alive)
    if lost:
        return Decision(action=Action.EVICT, reason=f"{', '.join(lost)} stopped answering")
    if group.open and me.id in group.member_ids:
        return Decision(action=Action.ENTER, reason=f"generation {group.generation} has me as a member")
    if me.id not in group.waiting_ids:
        return Decision(
            action=Action.JOIN, reason=f"not yet waiting for a generation after {group.generation}"
        )
    if group.open:
        why = f", {CUT}" if me.id in excluded(group, alive=alive) else ""
        return Decision(
            action=Action.WAIT, reason=f"waiting: generation {group.generation} is open without me{why}"
        )
    return _decide_forming(group, me, alive=alive, timing=timing, policy=policy)


def _decide_forming(
    group: Group, me: Node, *, alive: AbstractSet[str], timing: Timing, policy: GroupPolicy
) -> Decision:
    number = group.generation + 1
    waited_s = 0.0 if timing.closed_since_s is None else timing.now_s - timing.closed_since_s
    nodes, away = _next_members(group, alive=alive, policy=policy), excluded(group, alive=alive)
    # One that is apart may be held up by what it cannot reach, and disturbs nobody.
    busy = [n.id for n in group.members if n.id in alive - away and n.id not in group.waiting_ids]
    if me.id in away:
        reason = f"generation {number} is formed without me, {CUT}"
    elif busy:
        reason = f"generation {number} waits for {', '.join(busy)} to stop their workers"
    elif len(nodes) < policy.min_nodes:
        reason = f"generation {number} waits for nodes: {len(nodes)} of at least {policy.min_nodes} are here"
    elif nodes[0].id != me.id:
        reason = f"generation {number} is formed by {nodes[0].id}"
    elif _is_last_call(group, nodes, timing=timing, policy=policy):
        reason = f"generation {number} waits {policy.last_call_s:g} s for stragglers"
    else:
        return Decision(
            action=Action.FORM, reason=f"generation {number} is ready with {', '.join(n.id for n in nodes)}"
        )
    if waited_s > policy.timeout_s:
        return Decision(action=Action.GIVE_UP, reason=f"{reason}; gave up after {policy.timeout_s:g} s")
    return Decision(action=Action.WAIT, reason=reason)


def update_timing(
    last: Timing, group: Group, *, alive: AbstractSet[str], now_s: float, policy: GroupPolicy
) -> Timing:
    """`last`, brought up to what is seen now: a stretch of time goes on as long as its condition holds at every look."""
    is_closed = not group.open and group.ended is None
    is_enough = len(_next_members(group, alive=alive, policy=policy)) >= policy.min_nodes
    return Timing(
        now_s=now_s,
        closed_since_s=_since(last.closed_since_s, holds=is_closed, now_s=now_s),
        enough_since_s=_since(last.enough_since_s, holds=is_enough, now_s=now_s),
    )


def _since(since_s: float | None, *, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _is_last_call(group: Group, nodes: tuple[Node, ...], *, timing: Timing, policy: GroupPolicy) -> bool:
    if _continues(group, nodes) or len(nodes) >= policy.max_nodes:
        return False
    # The former of the next generation is enough by itself to have seen enough nodes since some moment.
    since_s = timing.now_s if timing.enough_since_s is None else timing.enough_since_s
    return timing.now_s - since_s < policy.last_call_s


def _continues(group: Group, nodes: tuple[Node, ...]) -> bool:
    """Somebody of the previous generation is here, so its training stands still while we wait."""
    return any(node.id in group.member_ids for node in nodes)


def lost_members(group: Group, *, alive: AbstractSet[str]) -> tuple[str, ...]:
    """Members of the open generation that no longer answer."""
    return tuple(n.id for n in group.members if n.id not in alive) if group.open else ()


def lost_waiting(group: Group, *, alive: AbstractSet[str]) -> tuple[str, ...]:
    """Those who wait, or report others, and no longer answer."""
    named = dict.fromkeys([*(node.id for node in group.waiting), *(c.node for c in group.reports)])
    return tuple(name for name in named if name not in alive)


def queue(group: Group, *, alive: AbstractSet[str]) -> tuple[Node, ...]:
    """The live waiting nodes that are not apart, in the rank order of the next generation: previous members keep theirs, then by arrival."""
    away = excluded(group, alive=alive)
    waiting = {node.id: node for node in group.waiting if node.id in alive and node.id not in away}
    previous = [waiting[node.id] for node in group.members if node.id in waiting]
    return (*previous, *(node for node in waiting.values() if node.id not in group.member_ids))


def excluded(group: Group, *, alive: AbstractSet[str]) -> frozenset[str]:
    """Live nodes that cannot train with the members: as few of these as it takes, and whoever else is cut off from one that stays.

    A newcomer never displaces a member, so that a generation in which all reach each other is never ended for want of reach.
    """
    members = [node.id for node in group.members if node.id in alive]
    gone = frozenset(nodes_to_exclude(members, group.reports))
    pairs, stay = broken_links(group.reports), frozenset(members) - gone
    others = (node.id for node in group.waiting if node.id in alive and node.id not in members)
    return gone | {name for name in others if any({name, other} in pairs for other in stay)}


def admitted(
    nodes: tuple[Node, ...], *, reports: tuple[UnreachableReport, ...], policy: GroupPolicy
) -> tuple[Node, ...]:
    """Those of `nodes` that fit and reach each other, first come first served; one that is too large does not hold up a smaller one behind it."""
    chosen: list[Node] = []
    workers, pairs = 0, broken_links(reports)
    for node in nodes:
        fits = policy.max_workers is None or workers + node.nproc <= policy.max_workers
        reaches = not any({node.id, other.id} in pairs for other in chosen)
        if len(chosen) < policy.max_nodes and fits and reaches:
            chosen.append(node)
            workers += node.nproc
    return tuple(chosen)


def _next_members(group: Group, *, alive: AbstractSet[str], policy: GroupPolicy) -> tuple[Node, ...]:
    return admitted(queue(group, alive=alive), reports=group.reports, policy=policy)


def newcomers(group: Group, *, alive: AbstractSet[str], policy: GroupPolicy) -> tuple[Node, ...]:
    """Waiting nodes that a new generation would admit beside the live members of this open one; a spare is not among them."""
    if not group.open or is_partitioned(group, alive=alive):
        return ()
    stay = tuple(node for node in group.members if node.id in alive)
    come = tuple(n for n in queue(group, alive=alive) if n.id not in group.member_ids)
    chosen = admitted((*stay, *come), reports=group.reports, policy=policy)
    return tuple(node for node in chosen if node.id not in group.member_ids)


def join(group: Group, node: Node) -> Group:
    """`node` has no workers and wants to be in the next generation."""
    is_in = group.open and node.id in group.member_ids
    if group.ended is not None or is_in or node in group.waiting:
        return group
    return replace(group, waiting=(*(n for n in group.waiting if n.id != node.id), node))


def form(group: Group, *, alive: AbstractSet[str], endpoint: str, policy: GroupPolicy) -> Group:
    """Open the next generation with all who are waiting, alive and admitted; the rest of the living stay as spares."""
    members = _next_members(group, alive=alive, policy=policy)
    if group.open or group.ended is not None or len(members) < policy.min_nodes:
        return group
    continued = group.cause if _continues(group, members) else RESUME
    waiting = tuple(node for node in group.waiting if node.id in alive and node not in members)
    return replace(
        group,
        generation=group.generation + 1,
        open=True,
        members=members,
        waiting=waiting,
        done=(),
        endpoint=endpoint,
        cause=START if group.generation == 0 else continued,
        failure=None,
        reports=tuple(report for report in group.reports if report.node in alive),
    )


def close(
    group: Group, *, generation: int, cause: str, step: int, counts: bool, failure: Failure | None = None
) -> Group:
    """End the open generation, if it is still `generation`. `step`: the last that the caller's workers finished.

    `counts`: a failure, which uses up a restart; a change of membership does not. The first to close decides; a later
    one only adds the failure if none was told yet, because a victim may be quicker than the culprit.
    """
    if generation != group.generation or group.ended is not None:
        return group
    if not group.open:
        return group if group.failure is not None else replace(group, failure=failure)
    before = 0 if step > group.high_step else group.restarts
    return replace(
        group,
        open=False,
        endpoint=None,
        cause=cause,
        restarts=before + 1 if counts else before,
        high_step=max(step, group.high_step),
        failure=failure,
    )


def evict(group: Group, *, alive: AbstractSet[str], step: int = 0) -> Group:
    """Forget waiting nodes that no longer answer, and what they said; close the open generation if one of its members does not."""
    kept = replace(
        group,
        waiting=tuple(node for node in group.waiting if node.id in alive),
        reports=tuple(report for report in group.reports if report.node in alive),
    )
    if not lost_members(group, alive=alive):
        return kept
    return close(kept, generation=group.generation, cause=NODE_LOST, step=step, counts=False)


def report_unreachable(group: Group, *, node_id: str, peers: tuple[str, ...]) -> Group:
    """Say whom this node does not hear both ways now; none: it has no report any more."""
    if group.ended is not None or node_id not in group.member_ids | group.waiting_ids:
        return group
    said = UnreachableReport(node=node_id, peers=peers)
    if said in group.reports or (not peers and all(c.node != node_id for c in group.reports)):
        return group
    kept = tuple(report for report in group.reports if report.node != node_id)
    return replace(group, reports=(*kept, said) if peers else kept)


def reported(group: Group) -> frozenset[str]:
    """Who complains, and of whom; also those who are on their way back into the group."""
    return frozenset(name for report in group.reports for name in (report.node, *report.peers))


def is_partitioned(group: Group, *, alive: AbstractSet[str]) -> bool:
    """Whether live members of the open generation report_unreachable of each other."""
    return group.open and not excluded(group, alive=alive).isdisjoint(group.member_ids)


def close_if_partitioned(group: Group, *, alive: AbstractSet[str], step: int) -> Group:
    """Close the open generation if live members report each other unreachable; the next one is formed without some of them."""
    if not is_partitioned(group, alive=alive):
        return group
    return close(group, generation=group.generation, cause=NODE_LOST, step=step, counts=False)


def leave(group: Group, node_id: str) -> Group:
    """`node_id` goes for good; the generation it is in, if open, ends with it."""
    if node_id in group.member_ids:
        closed = close(group, generation=group.generation, cause=NODE_LEFT, step=0, counts=False)
        members = tuple(node for node in closed.members if node.id != node_id)
        group = replace(closed, members=members)
    if node_id in group.waiting_ids:
        group = replace(group, waiting=tuple(node for node in group.waiting if node.id != node_id))
    return replace(group, reports=tuple(c for c in group.reports if c.node != node_id))


def done(group: Group, *, generation: int, node_id: str) -> Group:
    """All workers of `node_id` finished; when all members have said so, the run is complete."""
    current = group.open and generation == group.generation and group.ended is None
    if not current or node_id not in group.member_ids or node_id in group.done:
        return group
    told = replace(group, done=(*group.done, node_id))
    if group.member_ids - set(told.done):
        return told
    return end(told, generation=generation, run_end=RunEnd(exit_code=EXIT_COMPLETE, reason="complete"))


def end(group: Group, *, generation: int, run_end: RunEnd) -> Group:
    """The run is over for every node, if the group is still at `generation`; the first verdict stands."""
    if generation != group.generation or group.ended is not None:
        return group
    return replace(group, open=False, endpoint=None, ended=run_end)


def reopen(group: Group) -> Group:
    """A person starts a failed or interrupted run again; a complete one stays complete. Generations go on counting."""
    if group.ended is None or group.ended.exit_code == EXIT_COMPLETE:
        return group
    return replace(
        group,
        members=(),
        waiting=(),
        done=(),
        cause=RESUME,
        restarts=0,
        failure=None,
        ended=None,
        reports=(),
    )


def reset(group: Group) -> Group:
    """Another run meets under the name of one that was: nothing stays but the number of generations."""
    return replace(Group.empty(), generation=group.generation)


def last_known_state(group: Group) -> Group:
    """What a node goes by when the shared state is gone: the generation is over, its members go on, and whoever waits has to come again."""
    return replace(
        group,
        open=False,
        waiting=(),
        done=(),
        endpoint=None,
        cause=NODE_LOST if group.open else group.cause,
        reports=(),
    )


def restore_lost_state(group: Group, known: Group) -> Group:
    """`known` in the place of a group in which nothing was formed yet: the state was lost, with a store or a folder, and is begun anew by somebody who knows less.

    So generations are not counted twice, and who was in the last one keeps its rank.
    """
    is_new = group.cause == START and not group.open and not group.members and group.ended is None
    if not is_new or known.ended is not None or group.generation > known.generation:
        return group
    return replace(known, waiting=group.waiting, reports=group.reports)
