"""The shared state of a group changes only along these arrows, and only by functions of values.

      a person starts the run again: reopen, take_over
      +----------------------------------------------------+
      |            JOIN             FORM        done, end  |
      v                                                    |
    closed -----------> forming ---------> open --------> ended
      ^ ^                  |                |
      | +------------------+                |
      |   leave, EVICT: of the last         |
      |   node that waits                   |
      +-------------------------------------+
          close: a worker failed, or waiting nodes are to be admitted
          leave: a member goes for good, once others or a checkpoint have its state (withdraw)
          EVICT: a member is dead
          close_if_partitioned: members cannot reach each other

*forming* is not stored: the group is not open, and some node waits. A generation that is closed
while spares wait is therefore forming at once. A generation that is *closed* is followed by another
one; torch's `is_closed` and `set_closed` speak of a run that has ended. `end` is possible in
every state, and only once; `reset` and `take_over` lead from every state to closed, and `count_on`
changes no state. `reopen` and what follows it say what a group keeps that begins again.
`next_action` says what a node does whose workers are stopped:

    the group is | and the node                    | its action
    -------------+---------------------------------+--------------------
    ended        | is any                          | STOP
    not ended    | sees that another one is dead   | EVICT
    closed       | has not joined                  | JOIN
    forming      | has not joined                  | JOIN
    forming      | waits                           | FORM, WAIT, GIVE_UP
    open         | is a member                     | ENTER
    open         | is no member and has not joined | JOIN
    open         | is no member and waits          | WAIT

What happens when a machine dies: its heartbeat counter stands still. All other agents poll the
group, and the failure detector of one of them is the first to count `keep_alive_s` of silence. That
agent EVICTs: the generation is closed with the cause "node lost", which uses up no restart. The
other agents see the closed generation at their next poll, kill their workers (the training state is
in the snapshots of the nodes) and JOIN. When all live members wait, the first of them in rank order
FORMs the next generation, whose number is one higher, with a fresh address of its own for the
TCPStore, and all ENTER. If the dead machine had rank 0, the next in rank order is the first. If the
machine was only frozen and wakes up, the generation number that it holds is too old: every
transition that names it changes nothing, so the machine is fenced. It stops its workers and JOINs
like any newcomer.

A transition does not promise to take effect: `Rendezvous` must get it through compare-and-set. When
another node was faster, it reads the new state and decides again. Nor does it promise a generation
where the first node lives and cannot form one, as without a descriptor for the store: the others
give up after `--rdzv-timeout`.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum, auto

from elastic.errors import EXIT_COMPLETE
from elastic.rendezvous import membership
from elastic.rendezvous.group import Group, Node, RunEnd, SharedSettings, WorkerFailure
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.partition import UnreachableReport

START = "start"
NEW_RUN = "new run"  # of a group whose name another run had; its first generation is a start
RESUME = "resume"
NODE_LOST = "node lost"
NODE_LEFT = "node left"
NODE_JOINED = "node joined"
FAILURE = "failure"
DIVERGED = "ranks differed"
REHEARSAL = "rehearsal"  # all workers are started anew, to do a step again
LONGEST_PAUSE_S = 30.0
PARTITIONED = "because the network between the others and me is cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Readings of this node's own monotonic clock, in seconds.

    A `..._since_s` is `now_s` as long as its condition does not hold: it has held for 0 s.
    """

    now_s: float
    closed_since_s: float  # the group is not open, seen by this node while it waits
    enough_since_s: float  # enough nodes wait for a generation


class GroupAction(Enum):
    JOIN = auto()
    FORM = auto()
    WAIT = auto()
    ENTER = auto()
    EVICT = auto()
    GIVE_UP = auto()
    STOP = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecision:
    action: GroupAction
    reason: str


def next_action(
    group: Group, me: Node, *, alive: AbstractSet[str], timing: Timing, policy: GroupPolicy
) -> GroupDecision:
    """The next action of `me`, whose workers are stopped. `alive`: all live nodes and `me`."""
    lost = membership.lost(group, alive=alive)
    if group.ended is not None:
        action, reason = GroupAction.STOP, f"the run has ended: {group.ended.reason}"
    elif lost:
        action, reason = GroupAction.EVICT, f"{', '.join(lost)} stopped answering"
    elif group.open and me.id in group.member_ids:
        action, reason = GroupAction.ENTER, f"generation {group.generation} has me as a member"
    elif me.id not in group.waiting_ids:
        action, reason = GroupAction.JOIN, f"not yet waiting for a generation after {group.generation}"
    elif group.open:
        why = f", {PARTITIONED}" if me.id in membership.excluded(group, alive=alive) else ""
        reason = f"waiting: generation {group.generation} is open without me{why}"
        action = GroupAction.WAIT
    else:
        return _next_action_forming(group, me, alive=alive, timing=timing, policy=policy)
    return GroupDecision(action=action, reason=reason)


def _next_action_forming(
    group: Group, me: Node, *, alive: AbstractSet[str], timing: Timing, policy: GroupPolicy
) -> GroupDecision:
    number = group.generation + 1
    nodes = membership.next_members(group, alive=alive, policy=policy)
    names = [node.id for node in nodes]
    if me.id in membership.excluded(group, alive=alive):
        reason = f"generation {number} is formed without me, {PARTITIONED}"
    elif who := _who_is_missing(group, nodes, alive=alive, policy=policy):
        reason = who
    elif names[0] != me.id:
        reason = f"generation {number} is formed by {names[0]}"
    elif pause := _pause(group, nodes, timing=timing, policy=policy):
        reason = pause
    else:
        reason = f"generation {number} is ready with {', '.join(names)}"
        return GroupDecision(action=GroupAction.FORM, reason=reason)
    if timing.now_s - timing.closed_since_s > policy.timeout_s:
        reason += f"; gave up after {policy.timeout_s:g} s"
        return GroupDecision(action=GroupAction.GIVE_UP, reason=reason)
    return GroupDecision(action=GroupAction.WAIT, reason=reason)


def _who_is_missing(
    group: Group, nodes: tuple[Node, ...], *, alive: AbstractSet[str], policy: GroupPolicy
) -> str:
    """Empty if none is. nodes: the next members.

    A live member that does not wait yet is still stopping its workers. Without it the generation
    would have to close a moment later to admit it. An excluded member is not waited for: it will
    not be in the next generation, and what it cannot reach may be what holds up its workers.
    """
    number, expected = group.generation + 1, alive - membership.excluded(group, alive=alive)
    busy = [n.id for n in group.members if n.id in expected and n.id not in group.waiting_ids]
    if busy:
        return f"generation {number} waits for {', '.join(busy)} to stop their workers, or to save what they leave behind"
    if len(nodes) < policy.min_nodes:
        return f"generation {number} waits for nodes: {len(nodes)} of at least {policy.min_nodes} are here"
    return ""


def _pause(group: Group, nodes: tuple[Node, ...], *, timing: Timing, policy: GroupPolicy) -> str:
    """Why the next generation waits, although all nodes are here; empty if it does not."""
    number = group.generation + 1
    is_last_call = not membership.continues(group, nodes) and len(nodes) < policy.max_nodes
    # Only the node that forms the generation needs to have seen enough nodes for `last_call_s`. No
    # two clocks are compared, and when this node dies the next one starts its own count.
    if is_last_call and timing.now_s - timing.enough_since_s < policy.last_call_s:
        return f"generation {number} waits {policy.last_call_s:g} s for stragglers"
    if (pause_s := restart_pause_s(group)) > timing.now_s - timing.closed_since_s:
        return f"generation {number} waits {pause_s:g} s, since {group.restarts} restarts in a row brought no step"
    return ""


def restart_pause_s(group: Group) -> float:
    """How long the next generation waits after a failure.

    The first failure since a new step costs nothing. What fails again at once has a cause that may
    pass, such as a full disk, and would use up all restarts within a second.
    """
    if group.cause != FAILURE or group.restarts < 2:
        return 0.0
    return min(2.0 ** min(group.restarts - 2, 32), LONGEST_PAUSE_S)


def update_timing(
    last: Timing, group: Group, *, alive: AbstractSet[str], policy: GroupPolicy, now_s: float
) -> Timing:
    """`last` after one more poll; a condition must hold at every poll for its time to go on."""
    is_closed = not group.open and group.ended is None
    is_enough = len(membership.next_members(group, alive=alive, policy=policy)) >= policy.min_nodes
    return Timing(
        now_s=now_s,
        closed_since_s=last.closed_since_s if is_closed else now_s,
        enough_since_s=last.enough_since_s if is_enough else now_s,
    )


def join(group: Group, node: Node) -> Group:
    """`node` has no running workers and waits for the next generation."""
    is_in = group.open and node.id in group.member_ids
    if group.ended is not None or is_in or node in group.waiting:
        return group
    return replace(group, waiting=(*(n for n in group.waiting if n.id != node.id), node))


def form(group: Group, *, alive: AbstractSet[str], endpoint: str, policy: GroupPolicy) -> Group:
    """Open the next generation with the admitted live nodes; the other waiting nodes are spares.

    The dead ones were evicted before: see `next_action`.
    """
    members = membership.next_members(group, alive=alive, policy=policy)
    if group.open or group.ended is not None or len(members) < policy.min_nodes:
        return group
    continued = group.cause if membership.continues(group, members) else RESUME
    chosen = {node.id for node in members}
    waiting = tuple(node for node in group.waiting if node.id in alive and node.id not in chosen)
    return replace(
        group,
        generation=group.generation + 1,
        open=True,
        members=members,
        waiting=waiting,
        done=(),
        endpoint=endpoint,
        cause=START if group.generation == 0 or group.cause == NEW_RUN else continued,
        failure=None,
        reports=tuple(report for report in group.reports if report.node in alive),
    )


def close(
    group: Group, *, generation: int, cause: str, step: int, counts: bool, failure: WorkerFailure | None
) -> Group:
    """End the open generation if it is still `generation`.

    `step`: the last step that the caller's workers finished. `counts`: the cause is a failure,
    which uses up a restart; a change of membership does not. A step above `high_step` is progress
    and sets the count of restarts back first.

    The first close decides. A later one adds its failure if none is known yet: when a worker dies,
    the workers of other nodes fail in their collectives, and the agent of such a victim may be
    faster than the agent of the culprit, which alone knows the traceback.
    """
    if generation != group.generation or group.ended is not None:
        return group
    if not group.open:
        return group if group.failure is not None else replace(group, failure=failure)
    before = 0 if step > group.high_step else group.restarts
    restarts, high_step = before + 1 if counts else before, max(step, group.high_step)
    return replace(
        group, open=False, endpoint=None, cause=cause, restarts=restarts, high_step=high_step, failure=failure
    )


def evict(group: Group, *, alive: AbstractSet[str], step: int = 0) -> Group:
    """Remove dead nodes and their reports; close the generation of a dead member.

    A failure in a generation that lost a node is not the recipe's, and is not counted: a
    machine that is taken away may lose its workers before its agent, and scripts without this
    library fail with an error of their own when their peers are gone.
    """
    if membership.lost_members(group, alive=alive):
        if not group.open and group.cause == FAILURE:
            group = replace(group, cause=NODE_LOST, restarts=max(0, group.restarts - 1))
        number = group.generation
        group = close(group, generation=number, cause=NODE_LOST, step=step, counts=False, failure=None)
    members = group.members if group.open else tuple(n for n in group.members if n.id in alive)
    waiting = tuple(node for node in group.waiting if node.id in alive)
    reports = tuple(report for report in group.reports if report.node in alive)
    return replace(group, members=members, waiting=waiting, reports=reports)


def report_unreachable(group: Group, *, node_id: str, peers: tuple[str, ...]) -> Group:
    """Replace the report of `node_id`: it cannot reach these peers now. No peers: withdraw it."""
    if group.ended is not None or node_id not in group.member_ids | group.waiting_ids:
        return group
    report = UnreachableReport(node=node_id, peers=peers)
    if report in group.reports or (not peers and all(each.node != node_id for each in group.reports)):
        return group
    kept = tuple(each for each in group.reports if each.node != node_id)
    return replace(group, reports=(*kept, report) if peers else kept)


def close_if_partitioned(group: Group, *, alive: AbstractSet[str], step: int) -> Group:
    """Close a generation whose members are partitioned; the next is formed without some of them."""
    if not membership.is_partitioned(group, alive=alive):
        return group
    return close(group, generation=group.generation, cause=NODE_LOST, step=step, counts=False, failure=None)


def withdraw(group: Group, node_id: str, *, alive: AbstractSet[str], is_shared: bool) -> Group:
    """`node_id` has stopped its workers and is to leave: this comes first, and `leave` second.

    is_shared: the other members have its newest state in memory. While one of them lives, the node
    leaves at once. Otherwise it stays a member that does not wait, so that the next generation
    waits until it has saved its state: a spare, or a node that joined a moment ago, would begin
    from an older one, and a save that ends later would be fenced.
    """
    others = any(node.id in alive and node.id != node_id for node in group.members)
    left = leave(group, node_id)
    if node_id not in group.member_ids or (is_shared and others) or group.ended is not None:
        return left
    return replace(left, members=group.members)


def leave(group: Group, node_id: str) -> Group:
    """Remove `node_id` for good. An open generation that it is in is closed."""
    if node_id in group.member_ids:
        number, members = group.generation, tuple(node for node in group.members if node.id != node_id)
        closed = close(group, generation=number, cause=NODE_LEFT, step=0, counts=False, failure=None)
        group = replace(closed, members=members)
    if node_id in group.waiting_ids:
        group = replace(group, waiting=tuple(node for node in group.waiting if node.id != node_id))
    return replace(group, reports=tuple(report for report in group.reports if report.node != node_id))


def done(group: Group, *, generation: int, node_id: str) -> Group:
    """All workers of `node_id` finished. The last member to report it ends the run as complete."""
    current = group.open and generation == group.generation and group.ended is None
    if not current or node_id not in group.member_ids or node_id in group.done:
        return group
    reported_done = replace(group, done=(*group.done, node_id))
    if group.member_ids - set(reported_done.done):
        return reported_done
    run_end = RunEnd(exit_code=EXIT_COMPLETE, reason="complete")
    return end(reported_done, generation=generation, run_end=run_end)


def report_commit(group: Group, step: int) -> Group:
    """A checkpoint of this step is committed; the newest counts."""
    return group if step <= group.committed_step else replace(group, committed_step=step)


def end(group: Group, *, generation: int | None, run_end: RunEnd) -> Group:
    """The run is over for every node if `generation` is the newest; the first call counts.

    None: whichever is the newest. Two states of one step are wrong in every generation, and the
    node that finds them may be in none any more.
    """
    if generation not in (None, group.generation) or group.ended is not None:
        return group
    return replace(group, open=False, endpoint=None, ended=run_end)


# A group begins again when a person starts a run that has ended, when another run takes its name,
# and when the backend is a new one. It counts its generations on, and keeps what still holds of the
# old one. A backend that has lost its state gets it back from any process that has seen it.


def reopen(group: Group, *, is_new: bool = False) -> Group:
    """A person starts a failed or interrupted run again. A complete run stays complete.

    is_new: the end is that of another run of the same name, whose counts and members go too.
    """
    if group.ended is None or (group.ended.exit_code == EXIT_COMPLETE and not is_new):
        return group
    return reset(group) if is_new else _resumed(group)


def reset(group: Group) -> Group:
    """Another run takes over the name of an old one. Only the number of generations goes on.

    If generations were counted from zero again, a process of the old run that wakes up could hold
    the number of a new generation, and the fence would let it through. If the number stayed the
    same, a node of the old run that has not read its end would take the new state for a lost one,
    and put the old state back.
    """
    return replace(Group(), generation=group.generation + 1, cause=NEW_RUN)


def _resumed(group: Group) -> Group:
    """The same run begins again without any of its nodes; what it has reached stays."""
    return replace(
        Group(),
        generation=group.generation,
        cause=NEW_RUN if group.cause == NEW_RUN else RESUME,
        high_step=group.high_step,
        committed_step=group.committed_step,
        settings=group.settings,
    )


def take_over(group: Group, settings: SharedSettings) -> Group:
    """The first node with these settings comes, and no node of the group is alive."""
    if group.settings is not None and group.settings.run != settings.run:
        group = reset(group)
    elif group.member_ids | group.waiting_ids:
        group = _resumed(group)
    return replace(group, settings=settings)


def count_on(group: Group, newest: int, *, has_begun: bool) -> Group:
    """The group of a run whose `newest` generation is known from the run directory.

    The backend is new, lost its state, or was last used before another one was. Were a number given
    twice, a process that is left from the earlier generation of this number would no longer be
    fenced, and the logs of that generation would be in the way. has_begun: whether the run has had
    a generation; then the next one is no start, whatever its name was before.
    """
    if not group.open and group.generation < newest:
        is_new = group.cause == START and not has_begun
        group = replace(group, generation=newest, cause=NEW_RUN if is_new else group.cause)
    return replace(group, cause=RESUME) if has_begun and group.cause == NEW_RUN else group
