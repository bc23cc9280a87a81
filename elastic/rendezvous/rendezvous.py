"""A node acts for a generation only if its last poll found it a member; otherwise it is fenced.

A `Rendezvous` is one node's live view of the group, over a backend. Heartbeats have a thread of
their own. Everything else happens in the caller's thread, one poll at a time: read the group, judge
who is alive (`GroupObserver`), compute a transition, try to get it through compare-and-set. A
transition that loses against another node's is computed again from the new state, or dropped.

It does not start or stop workers, and does not decide how often a run may fail.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass
from functools import partial

from elastic.errors import EXIT_COMPLETE, GroupEnded, Interrupted, RendezvousTimeout, UsageError
from elastic.rendezvous import membership, observer, transitions
from elastic.rendezvous.backends.backend import Backend, BackendFailed
from elastic.rendezvous.group import (
    ANY_RUN,
    Group,
    Node,
    RunEnd,
    RunKey,
    SharedSettings,
    WorkerFailure,
    refusal,
)
from elastic.rendezvous.group_writer import GroupWriter, Verb
from elastic.rendezvous.heartbeat import Heartbeat
from elastic.rendezvous.reachability import PartitionDetector, ProbeExchange, Probes
from elastic.rendezvous.transitions import NODE_LOST, GroupAction, next_action
from elastic.system.clock import Clock

POLL_S = 0.02
# Between two polls, for each node of a wide group: what all of them ask of the backend then does
# not grow with their number.
POLL_S_PER_NODE = 0.0002
LONGEST_POLL_S = 0.5
STRANGERS_POLL_S = 0.1  # while nodes of another run are in the place
LOOK_S = 2.0  # between two looks whether the run is complete
LOSES_NODE = partial(transitions.close, cause=NODE_LOST, step=0, counts=False, failure=None)


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
        """The place of `me` in the open generation, as a member of it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """What one poll saw of the generation that this node entered last.

    `fenced`: the group went on without this node, which must stop its workers and join.
    `newcomers`: waiting nodes that a new generation would admit. `lost`: ids of members that were
    found dead. `cause` and `failure`: why the group's last generation was closed, unless it is
    open.
    """

    open: bool
    fenced: bool
    newcomers: tuple[Node, ...]
    lost: tuple[str, ...]
    ended: RunEnd | None
    cause: str
    failure: WorkerFailure | None


@dataclass
class Rendezvous:
    """`open_endpoint` returns a fresh "host:port" of this node for a generation's TCPStore.

    `notify` is called with each new reason why the node waits, or something is wrong.
    `min_generation`: the newest generation known from the run directory; a group whose state was
    lost, or is an older one, counts on from it. `has_begun`: whether this run has had a generation;
    None: yes if `min_generation` > 0. `run`: which one it is. `probes`: where nodes can probe each
    other. `is_complete`: whether the run is known to have ended well, asked now and then while the
    backend does not answer. `newest_generation`: as `min_generation`, asked before a generation is
    formed.
    """

    backend: Backend
    me: Node
    policy: membership.GroupPolicy
    keep_alive_s: float
    clock: Clock
    open_endpoint: Callable[[], str]
    notify: Callable[[str], None] = lambda _reason: None
    min_generation: InitVar[int] = 0
    has_begun: InitVar[bool | None] = None
    probes: Probes | ProbeExchange | None = None
    run: RunKey = ANY_RUN
    is_complete: Callable[[], bool] = lambda: False
    newest_generation: Callable[[], int] = lambda: 0

    def __post_init__(self, min_generation: int, has_begun: bool | None) -> None:
        policy, keep_alive_s, me = self.policy, self.keep_alive_s, self.me
        settings = SharedSettings(
            run=self.run, min_nodes=policy.min_nodes, max_nodes=policy.max_nodes, keep_alive_s=keep_alive_s
        )
        detector = None if self.probes is None else PartitionDetector(self.probes, me.id, keep_alive_s)
        self._heartbeat = Heartbeat(self.backend, me.id, keep_alive_s=keep_alive_s, notify=self.notify)
        self._observer = observer.GroupObserver(
            backend=self.backend,
            me=me,
            policy=policy,
            settings=settings,
            heartbeat=self._heartbeat,
            clock=self.clock,
            min_generation=min_generation,
            has_begun=min_generation > 0 if has_begun is None else has_begun,
            partition_detector=detector,
        )
        self._writer = GroupWriter(self._observer)
        self._entered = 0
        self._closes = LOSES_NODE
        self._reason = ""
        self._is_waiting = True

    def join(self, interrupted: Callable[[], bool]) -> Generation:
        """Block until a new generation has this node, whose workers must be stopped, as a member.

        Raises GroupEnded, also where the backend does not answer and the run is complete;
        RendezvousTimeout after `policy.timeout_s` in a group that cannot form;
        Interrupted as soon as `interrupted()`; BackendFailed if the backend could not be reached
        for `policy.timeout_s`; GroupDamaged; UsageError for a group whose live nodes have other
        settings, in which this node then has changed nothing. The node is in the group until its
        caller leaves.
        """
        self._observer.begin_wait()
        began_s = reached_s = looked_s = self.clock.monotonic()
        while not interrupted():
            try:
                self._heartbeat.start()
                generation = self.poll_join()
                reached_s = self.clock.monotonic()
            except BackendFailed as error:
                self._notify_once(str(error))
                if self.clock.monotonic() - reached_s > self.policy.timeout_s:
                    raise
                # A store that a node serves ends with that node, which does not wait for those that
                # come late or were frozen.
                if self.clock.monotonic() - looked_s > LOOK_S:
                    if self.is_complete():
                        raise GroupEnded(EXIT_COMPLETE, str(error)) from error
                    looked_s = self.clock.monotonic()
                generation, self._is_waiting = None, True
            if generation is not None:
                return generation
            # After an action of this node its next one is often possible at once: no pause then. In
            # the first two seconds the others are about to come, because they just stopped
            # training.
            if self._is_waiting:
                soon_s = 0.004 if self.clock.monotonic() - began_s < 2.0 else POLL_S
                self.clock.sleep(max(soon_s, self.poll_s))
            else:
                self.clock.sleep(self._writer.pause_s)
        raise Interrupted

    def poll_join(self) -> Generation | None:
        """One poll and one action of `join`; None: not yet. Raises what `join` raises."""
        version, group = self._observer.poll()
        if group.settings != self._observer.settings and not (self._observer.is_ours(group) and group.ended):
            self._meet_strangers(version, group)
            return None
        alive = self._observer.alive
        updated = self._with_own_report(group)
        if updated != group:
            self._writer.set(version, updated)
            return None
        if group.open and group.generation == self._entered and self.me.id in group.member_ids:
            # This node stopped its workers while the backend was out of reach, so it could not
            # close the generation. It must do so now: `next_action` would let it ENTER the old one
            # again.
            self._writer.set(version, self._closes(group, generation=self._entered))
            return None
        decision = next_action(group, self.me, alive=alive, timing=self._observer.timing, policy=self.policy)
        if decision.action in (GroupAction.WAIT, GroupAction.EVICT, GroupAction.GIVE_UP):
            self._notify_once(decision.reason)
        self._is_waiting = decision.action is GroupAction.WAIT
        if decision.action not in (GroupAction.JOIN, GroupAction.EVICT):
            self._writer.take_back()
        match decision.action:
            case GroupAction.WAIT:
                pass
            case GroupAction.JOIN:
                self._writer.join(version, group)
            case GroupAction.EVICT:
                self._writer.evict(version, group)
            case GroupAction.FORM:
                # A node that slept may be alone with an old state of the group: what others did
                # since then is in the run directory.
                group = self._observer.number_from(self.newest_generation(), group)
                endpoint = self.open_endpoint()
                formed = transitions.form(group, alive=alive, endpoint=endpoint, policy=self.policy)
                self._writer.set(version, formed)
            case GroupAction.ENTER:
                self._entered, self._closes, self._reason = group.generation, LOSES_NODE, ""
                return Generation.of(group, self.me)
            case GroupAction.GIVE_UP:
                raise RendezvousTimeout(decision.reason)
            case GroupAction.STOP:
                assert group.ended is not None
                raise GroupEnded(group.ended.exit_code, group.ended.reason)
        return None

    def watch(self, *, step: int = 0) -> GroupView:
        """One cheap poll in a generation, which also evicts dead nodes and reports broken links.

        `step`: the last step that this node's workers finished. Raises BackendFailed: nothing
        was learned; the workers go on and the next poll tries again.
        """
        version, group = self._observer.poll()
        alive, changed = self._observer.alive, None
        lost = membership.lost_members(group, alive=alive) if group.open else ()
        if group.ended is None and membership.lost(group, alive=alive):
            changed = self._writer.evict(version, group, step=step)
        else:
            self._writer.take_back()
            updated = self._with_own_report(group, step=step)
            if updated != group and self._writer.set(version, updated):
                changed = updated
        group = changed or group
        mine = group.generation == self._entered and self.me.id in group.member_ids
        if mine and lost and group.ended is None:
            names, number = ", ".join(lost), self._entered
            self._notify_once(f"{names} of generation {number} stopped answering")
        return GroupView(
            open=mine and group.open,
            fenced=not mine,
            newcomers=membership.newcomers(group, alive=alive, policy=self.policy),
            lost=lost,
            ended=group.ended if self._observer.is_ours(group) else None,
            cause=group.cause,
            failure=group.failure,
        )

    @property
    def poll_s(self) -> float:
        """How long to wait between two calls of `watch`, at least: longer in a larger group."""
        nodes = membership.width(self._observer.newest, self.policy)
        return min(nodes * POLL_S_PER_NODE, LONGEST_POLL_S) if nodes > observer.ALL_WATCH_ALL else 0.0

    def close(self, cause: str, *, step: int, counts: bool, failure: WorkerFailure | None = None) -> Group:
        """Close the generation that this node entered last; returns the group after that.

        A newer generation stays untouched. Raises BackendFailed; `join` then closes it so.
        """
        self._closes = partial(transitions.close, cause=cause, step=step, counts=counts, failure=failure)
        return self._writer.change(partial(self._closes, generation=self._entered))

    def has_lost_member(self) -> bool:
        """One poll, after the generation was closed: whether a member of it is dead."""
        _, group = self._observer.poll()
        is_lost = bool(membership.lost_members(group, alive=self._observer.alive)) and not group.open
        # Where another node has evicted it, the failure is not one any more.
        return group.generation == self._entered and (is_lost or group.cause == NODE_LOST)

    def withdraw(self, is_shared: Callable[[int], bool]) -> tuple[bool, int | None]:
        """Close the open generation if this node is in it, and leave if others have its state.

        is_shared: whether the members of a generation have it. The group may be in a newer one than
        this node was in last, with other members: it was formed and this node has not entered it.
        If no node goes on with the state, this node keeps its place until `leave`, and must save
        its state before. Returns whether others go on with it, and in which generation, the newest,
        this node keeps its place, so that the next one waits for it; None where it is no member.
        """

        def withdrawn(group: Group) -> Group:
            alive = group.member_ids - self._observer.dead
            return transitions.withdraw(group, self.me.id, alive=alive, is_shared=is_shared(group.generation))

        group = self._writer.change(
            withdrawn, lambda group: Verb.WITHDRAW if is_shared(group.generation) else None
        )
        if self.me.id in group.member_ids:
            return False, group.generation
        return bool(group.member_ids & self._observer.alive), None

    def leave(self) -> Group:
        """Leave for good; closes the open generation if this node is in it."""
        return self._writer.change(lambda group: transitions.leave(group, self.me.id))

    def done(self) -> Group:
        """All workers of this node finished; the last member to report it completes the run."""
        done = partial(transitions.done, generation=self._entered, node_id=self.me.id)
        return self._writer.change(done, lambda _group: Verb.DONE)

    def report_commit(self, step: int) -> Group:
        """A checkpoint of this step is committed, whichever generation it was saved in."""
        return self._writer.change(
            lambda group: transitions.report_commit(group, step) if self._observer.is_ours(group) else group
        )

    def end(self, run_end: RunEnd, *, of_any: bool = False) -> Group:
        """End the run for all nodes. Nothing changes where the group went on without this node, but
        for `of_any`: it ends whichever generation there is. The group of another run never changes.
        """

        def ended(group: Group) -> Group:
            generation = None if of_any and self._observer.is_ours(group) else self._entered
            return transitions.end(group, generation=generation, run_end=run_end)

        return self._writer.change(ended)

    def reopen(self, *, is_new: bool = False) -> RunEnd | None:
        """Before the first join: a person started a failed or interrupted run again.

        is_new: the run directory is empty, so the state is that of another run of the same name.
        Returns how the run ended if it is complete, None where another run has ended.
        """

        def reopened(group: Group) -> Group:
            return transitions.reopen(group, is_new=is_new) if self._observer.is_ours(group) else group

        group = self._writer.change(reopened)
        return group.ended if self._observer.is_ours(group) else None

    @property
    def committed_step(self) -> int:
        """The newest step that this run's group has committed, as of the last poll; 0 for none."""
        group = self._observer.newest
        return group.committed_step if self._observer.is_ours(group) else 0

    def start(self) -> None:
        """Before the first join: send heartbeats once no live node of the group has other settings.

        Raises UsageError when one is alive; this node has written nothing then. BackendFailed.
        """
        while True:
            _, group = self._observer.poll()
            if group.settings == self._observer.settings or not self._may_live(group):
                return self._heartbeat.start()
            self.clock.sleep(STRANGERS_POLL_S)

    def has_lost_state(self) -> bool:
        """Whether the run has had generations, and the place to meet knows of no group.

        Raises BackendFailed.
        """
        version, _ = self._observer.poll()
        return version is None and self._observer.has_begun

    def is_deserted(self) -> bool:
        """Whether the run has ended, or all other nodes have left, as of the last poll that had an
        answer; this one asks once more.
        """
        with suppress(BackendFailed):
            self._observer.poll()
        group = self._observer.newest
        is_empty = not (group.member_ids | group.waiting_ids) - {self.me.id}
        return self._observer.is_ours(group) and (group.ended is not None or is_empty)

    def stop(self) -> None:
        """End the heartbeats. A node that has not left counts as dead a keep-alive later."""
        self._heartbeat.stop()

    def _may_live(self, group: Group) -> bool:
        """Whether a node of a group with other settings may live. Raises UsageError once one shows
        that it does.
        """
        if group.ended is not None:
            return False
        if self._observer.moving and group.settings is not None:
            raise UsageError(refusal(group.settings, self._observer.settings))
        return bool((group.member_ids | group.waiting_ids) & self._observer.alive - {self.me.id})

    def _meet_strangers(self, version: int | None, group: Group) -> None:
        """Take over a group with other settings once its nodes are dead.

        Raises UsageError when one is alive.
        """
        self._is_waiting = self._may_live(group)
        if self._is_waiting:
            self._notify_once("watching for a sign of life from the nodes of a group with other settings")
            return
        self._heartbeat.beat()
        taken_over = transitions.take_over(group, self._observer.settings)
        self._writer.set(version, transitions.join(taken_over, self.me))

    def _with_own_report(self, group: Group, step: int = 0) -> Group:
        """As the detector says, where nodes can probe each other."""
        seen = self._observer
        if seen.partition_detector is None:
            return group
        return seen.partition_detector.with_own_report(
            group, alive=seen.alive, moving=seen.moving, now_s=seen.timing.now_s, step=step
        )

    def _notify_once(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self.notify(reason)
