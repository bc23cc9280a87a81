"""A node acts for a generation only while its last look at the group found it there: fenced is seen
before anything is done.

One object is one node's live view. Its own thread only beats; everything else happens in the
caller's thread, one poll at a time. It does not start or stop workers, and does not decide how
often a run may fail.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.errors import GroupEnded, Interrupted, RendezvousTimeout, UsageError
from elastic.rendezvous import transitions
from elastic.rendezvous.backends.backend import Backend, BackendFailed, PublishesGeneration, TracksNodes
from elastic.rendezvous.failure_detector import NO_HEARTBEAT, FailureDetector
from elastic.rendezvous.group import Failure, Group, Node, RunEnd
from elastic.rendezvous.partition_detector import PartitionDetector, ProbeCounters
from elastic.rendezvous.transitions import Action, GroupPolicy, Timing
from elastic.system.clock import Clock

POLL_S = 0.02
QUICK_POLL_S = 0.004
SHORT_WAIT_S = 2.0
BEATS_PER_KEEP_ALIVE = 5
CHANGE_TRIES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The generation that this node is in; `base_rank` is the rank of its first worker, `world_size` counts all workers."""

    number: int
    members: tuple[Node, ...]
    rank_of_node: int
    endpoint: str
    cause: str
    restarts: int
    world_size: int
    base_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One look at the generation that this node entered last.

    `fenced`: the group went on without it; stop the workers and join. `newcomers` could be admitted
    now. `lost` stopped answering. `cause` and `failure` tell why it was closed, once `open` is
    False and `fenced` is not True.
    """

    open: bool
    fenced: bool
    newcomers: tuple[Node, ...]
    lost: tuple[str, ...]
    ended: RunEnd | None
    cause: str
    failure: Failure | None


class Rendezvous:
    def __init__(  # noqa: PLR0913 - the seam of a node to everything outside it
        self,
        backend: Backend,
        me: Node,
        policy: GroupPolicy,
        *,
        keep_alive_s: float,
        clock: Clock,
        open_endpoint: Callable[[], str],
        notify: Callable[[str, bool], None] | None = None,
        min_generation: int = 0,
        probes: ProbeCounters | None = None,
    ) -> None:
        """`open_endpoint` starts a fresh TCPStore on this node and gives its "host:port"; `notify`
        takes each new reason, and whether a person should know it because something is waited for
        or wrong. `min_generation`: the newest generation that the run is known to have had; a group
        that begins anew counts on from it. `probes`: who reaches whom, where that is known.
        """
        if policy.max_workers is not None and me.nproc > policy.max_workers:
            raise UsageError(
                f"a node may bring at most {policy.max_workers} workers, the most that the run has shards for, but this one"
                f" has {me.nproc}; lower --nproc-per-node"
            )
        self._backend = backend
        self._me = me
        self._policy = policy
        self._clock = clock
        self._open_endpoint = open_endpoint
        self._notify_node = notify
        self._publish = backend.publish_generation if isinstance(backend, PublishesGeneration) else None
        self._keep_alive_s = keep_alive_s
        self._failure_detector = FailureDetector(keep_alive_s=keep_alive_s)
        self._partition_detector = None if probes is None else PartitionDetector(probes, keep_alive_s)
        self._timing = Timing(now_s=clock.monotonic(), closed_since_s=None, enough_since_s=None)
        # What holds where the shared state is lost. Looks before the first join do not count: what
        # they see may be about to be forgotten on purpose.
        self._last_known = replace(Group.empty(), generation=min_generation)
        self._entered = 0
        self._reason = ""
        self._waits = True
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._beat_problem = ""  # why the last beat failed

    @property
    def timeout_s(self) -> float:
        """How long a group that cannot form, or cannot be reached, is waited for."""
        return self._policy.timeout_s

    def join(self, interrupted: Callable[[], bool]) -> Generation:
        """Block, polling, until a new generation has this node; its workers must be stopped.

        Raises GroupEnded, RendezvousTimeout after `policy.timeout_s` in a group that cannot form,
        Interrupted as soon as `interrupted()`, and BackendFailed if the backend could not be used
        for `policy.timeout_s`. This node has left the group then, except after BackendFailed.
        """
        self._start_beating()
        self._timing = replace(self._timing, closed_since_s=None)
        began_s = worked_s = self._clock.monotonic()
        while not interrupted():
            try:
                generation = self.poll_join()
                worked_s = self._clock.monotonic()
            except BackendFailed as error:
                self._tell(str(error))
                if self._clock.monotonic() - worked_s > self._policy.timeout_s:
                    raise
                generation, self._waits = None, True
            if generation is not None:
                return generation
            if self._waits:  # after an action of its own the next one is often possible at once
                # Those who trained a moment ago are about to come.
                is_short = self._clock.monotonic() - began_s < SHORT_WAIT_S
                self._clock.sleep(QUICK_POLL_S if is_short else POLL_S)
        try:
            group = self.leave()
        except BackendFailed:
            # Nobody can be told; whoever is left finds out by silence, and what this node has it
            # saves as if alone.
            raise Interrupted(others=False) from None
        raise Interrupted(others=bool(group.members or group.waiting))

    def poll_join(self) -> Generation | None:
        """One look and one action of `join`; None means not yet. Raises what `join` raises, but never Interrupted."""
        version, group = self._look()
        self._last_known = transitions.last_known_state(group)
        alive = self._alive
        if self._partition_detector is not None:
            told = self._partition_detector.report(group, me=self._me.id, alive=alive)
            if told != group:
                self._set(version, told)
                return None
        if group.open and group.generation == self._entered and self._me.id in group.member_ids:
            # The backend was out of reach when this node stopped its workers: it says so now.
            closed = transitions.close(
                group, generation=self._entered, cause=transitions.NODE_LOST, step=0, counts=False
            )
            self._set(version, closed)
            return None
        decision = transitions.decide(group, self._me, alive=alive, timing=self._timing, policy=self._policy)
        self._tell(decision.reason, aloud=decision.action in (Action.WAIT, Action.EVICT, Action.GIVE_UP))
        self._waits = decision.action is Action.WAIT
        match decision.action:
            case Action.WAIT:
                pass
            case Action.JOIN:
                # The first beat goes before the name, so that nobody meets a member that never
                # beat.
                self._backend.beat(self._me.id)
                self._set(version, transitions.join(group, self._me))
            case Action.EVICT:
                self._set(version, transitions.evict(group, alive=alive))
            case Action.FORM:
                endpoint = self._open_endpoint()
                self._set(
                    version, transitions.form(group, alive=alive, endpoint=endpoint, policy=self._policy)
                )
            case Action.ENTER:
                return self._enter(group)
            case Action.GIVE_UP:
                self.leave()
                raise RendezvousTimeout(decision.reason)
            case Action.STOP:
                assert group.ended is not None
                raise GroupEnded(group.ended.exit_code, group.ended.reason)
        return None

    def watch(self, *, step: int = 0) -> GroupView:
        """One cheap poll, which also evicts members that stopped answering; `step` is the last that
        own workers finished.

        Raises BackendFailed: nothing was learned, the workers may go on, look again.
        """
        version, group = self._look()
        self._last_known = transitions.last_known_state(group)
        alive = self._alive
        lost = transitions.lost_members(group, alive=alive)
        if group.ended is None and (lost or transitions.lost_waiting(group, alive=alive)):
            evicted = transitions.evict(group, alive=alive, step=step)
            group = evicted if self._set(version, evicted) else group
        elif self._partition_detector is not None and group.ended is None:
            judged = self._partition_detector.report_and_close(
                group, me=self._me.id, alive=alive, step=step, now_s=self._timing.now_s
            )
            group = judged if judged != group and self._set(version, judged) else group
        mine = group.generation == self._entered and self._me.id in group.member_ids
        watch = GroupView(
            open=mine and group.open,
            fenced=not mine,
            newcomers=transitions.newcomers(group, alive=alive, policy=self._policy),
            lost=lost,
            ended=group.ended,
            cause=group.cause,
            failure=group.failure,
        )
        self._tell(_watch_reason(watch, self._entered), aloud=bool(lost))
        return watch

    def close(self, cause: str, *, step: int, counts: bool, failure: Failure | None = None) -> Group:
        """End the generation that this node entered last, and give the group as it is then; a newer one stays untouched."""
        entered = self._entered
        return self._change(
            lambda group: transitions.close(
                group, generation=entered, cause=cause, step=step, counts=counts, failure=failure
            )
        )

    def leave(self) -> Group:
        """Go for good; ends the open generation if this node is in it."""
        return self._change(lambda group: transitions.leave(group, self._me.id))

    def done(self) -> Group:
        """All workers of this node finished; the last member to report it ends the run as complete."""
        return self._change(
            lambda group: transitions.done(group, generation=self._entered, node_id=self._me.id)
        )

    def end(self, run_end: RunEnd) -> Group:
        """End the run for all nodes; changes nothing if the group went on without this node."""
        return self._change(lambda group: transitions.end(group, generation=self._entered, run_end=run_end))

    def reopen(self, *, is_new: bool = False) -> Group:
        """Before the first join: let a failed or interrupted run form again because a person
        started it again.

        is_new: the run directory is empty, so what ended was another run of the same name.
        """
        return self._change(
            lambda group: (
                transitions.reset(group) if is_new and group.ended is not None else transitions.reopen(group)
            )
        )

    def reset(self) -> Group:
        """Before the first join, and only when nobody is in the group: forget it."""
        return self._change(transitions.reset)

    def stop(self) -> None:
        """End the beat thread; others take this node for dead after their keep-alive, unless it left."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> tuple[int | None, Group]:
        found = self._backend.read()
        version, there = (None, Group.empty()) if found is None else (found[0], Group.parse(found[1]))
        group = transitions.restore_lost_state(there, self._last_known)
        if self._publish is not None:
            self._publish(group.generation)
        now_s = self._clock.monotonic()
        others = (group.member_ids | group.waiting_ids | transitions.reported(group)) - {self._me.id}
        if isinstance(self._backend, TracksNodes):
            self._backend.track_nodes(others)
        beats = self._backend.beats()
        # Where this node cannot beat, on a full disk for example, the others most likely cannot
        # either.
        counters = {i: beats.get(i, NO_HEARTBEAT) for i in others}
        self._failure_detector = self._failure_detector.observe(
            counters, now_s=now_s, counts=not self._beat_problem
        )
        if self._partition_detector is not None:
            self._partition_detector.observe(group, now_s=now_s)
        self._timing = transitions.update_timing(
            self._timing, group, alive=self._alive, now_s=now_s, policy=self._policy
        )
        return version, group

    @property
    def _alive(self) -> frozenset[str]:
        return self._failure_detector.alive | {self._me.id}

    def _enter(self, group: Group) -> Generation:
        if group.generation == self._entered or group.endpoint is None:
            raise AssertionError(f"generation {group.generation} must be closed before it is joined again")
        self._entered = group.generation
        rank = [node.id for node in group.members].index(self._me.id)
        return Generation(
            number=group.generation,
            members=group.members,
            rank_of_node=rank,
            endpoint=group.endpoint,
            cause=group.cause,
            restarts=group.restarts,
            world_size=sum(node.nproc for node in group.members),
            base_rank=sum(node.nproc for node in group.members[:rank]),
        )

    def _set(self, version: int | None, group: Group) -> bool:
        is_set = self._backend.compare_and_set(version, group.to_json())
        if is_set:
            self._last_known = transitions.last_known_state(group)
        return is_set

    def _change(self, transition: Callable[[Group], Group]) -> Group:
        """Get `transition` through against all who write at the same time; raises BackendFailed after many tries."""
        for _ in range(CHANGE_TRIES):
            version, group = self._look()
            changed = transition(group)
            if changed == group or self._set(version, changed):
                return changed
            self._clock.sleep(POLL_S / 10)
        raise BackendFailed(
            f"the group's state changed under {self._me.id} {CHANGE_TRIES} times in a row; try again"
        )

    def _start_beating(self) -> None:
        if self._thread is None:
            self._backend.beat(self._me.id)
            self._thread = threading.Thread(
                target=self._beat_until_stopped, name="rendezvous-beat", daemon=True
            )
            self._thread.start()

    def _beat_until_stopped(self) -> None:
        while not self._stopped.wait(self._keep_alive_s / BEATS_PER_KEEP_ALIVE):
            try:
                self._backend.beat(self._me.id)
                self._beat_problem = ""
            except Exception as error:
                # This is the thread's edge: were it to die of one failed write, the others would
                # take a healthy node for dead some seconds later, with nothing in this node's log.
                if self._beat_problem != str(error) and self._notify_node is not None:
                    self._notify_node(f"heartbeat failed: {error}", True)
                self._beat_problem = str(error)

    def _tell(self, reason: str, *, aloud: bool = True) -> None:
        if reason != self._reason:
            self._reason = reason
            if self._notify_node is not None:
                self._notify_node(reason, aloud)


def _watch_reason(watch: GroupView, generation: int) -> str:
    if watch.ended is not None:
        return f"the run has ended: {watch.ended.reason}"
    if watch.fenced:
        return f"generation {generation} is over and the group went on without this node"
    if watch.lost:
        return f"{', '.join(watch.lost)} of generation {generation} stopped answering"
    if not watch.open:
        return f"generation {generation} was closed: {watch.cause}"
    if watch.newcomers:
        return f"{', '.join(n.id for n in watch.newcomers)} can be admitted to the next generation after {generation}"
    return f"generation {generation} is training"
