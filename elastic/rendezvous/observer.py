"""A poll costs little while nothing changes: each version is parsed once, and heartbeats are read
at a pace of their own.

The observer is what one node knows of the group: the newest state, which nodes it believes alive,
and since when it waits. It changes nothing.

It does not promise that the state is current when the caller acts on it: compare-and-set decides.
"""

from bisect import bisect_right
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from elastic.rendezvous import membership, transitions
from elastic.rendezvous.backends.backend import Backend, ReadsWithBeats
from elastic.rendezvous.failure_detector import NO_HEARTBEAT, FailureDetector
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.heartbeat import Heartbeat
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.partition import place
from elastic.rendezvous.reachability import PartitionDetector
from elastic.rendezvous.shared_settings import SharedSettings
from elastic.rendezvous.transitions import Timing
from elastic.system.clock import Clock

# So often in a keep-alive are heartbeats read; more often by a node that watches all N, every N
# times this, so that a small group finds a death at once.
BEATS_READ_S_PER_NODE = 0.004
BEATS_READ_PER_KEEP_ALIVE = 8
# If each node read the heartbeats of all others, a group of N nodes would read N² all the time. Up
# to ALL_WATCH_ALL nodes do so. In a larger group each reads those of the next WATCHED nodes in the
# ring that `place` orders, so each node is watched by as many, wherever it stands in rank order. A
# node that finds one of them silent watches all nodes until none is. A death is then found after
# one keep-alive, as in a small group, unless all that watch a node die with it: then the nodes that
# watch those find it, half a keep-alive later. A node that is not watched is presumed alive.
ALL_WATCH_ALL = 16
WATCHED = 4
# In keep-alive periods: of silence, from which on it watches all; and for how long after.
SUSPECTED_AFTER = 0.5
WATCHES_ALL_FOR = 2.0


class GroupObserver:
    """`last_known`: put back if the shared state is lost. The states that `reopen` and `reset` read
    before the first join are not kept there: they may be removed on purpose a moment later.

    `leads`: at the last poll this node was the first live member of its group, or the first that
    waits where there is no member: it does what one node does for all.
    """

    def __init__(  # noqa: PLR0913 - one node's eyes on everything outside it
        self,
        backend: Backend,
        me: Node,
        policy: GroupPolicy,
        settings: SharedSettings,
        *,
        heartbeat: Heartbeat,
        clock: Clock,
        min_generation: int,
        has_begun: bool,
        partition_detector: PartitionDetector | None,
    ) -> None:
        """`min_generation`, `has_begun`: known from the run directory; see Rendezvous."""
        self.newest = self.last_known = Group()
        self.settings = settings
        self.leads = False
        self.timing = Timing(now_s=clock.monotonic(), closed_since_s=None, enough_since_s=None)
        self._backend = backend
        self._me = me
        self._policy = policy
        self._heartbeat = heartbeat
        self._clock = clock
        self._min_generation = min_generation
        self.has_begun = has_begun
        self._partition_detector = partition_detector
        self._failure_detector = FailureDetector(keep_alive_s=settings.keep_alive_s)
        self._beats_due_s = float("-inf")
        self._parsed: tuple[bytes, Group] = (b"", Group())
        self._nodes: tuple[Group, frozenset[str]] = (Group(), frozenset())
        self._few: tuple[Group, frozenset[str]] = (Group(), frozenset())
        self._watches_all_until_s = float("-inf")
        self._longest_silence_s = 0.0
        self._dead = frozenset[str]()
        self._alive: tuple[frozenset[str], frozenset[str], frozenset[str]] = (frozenset(),) * 3
        self._is_enough: tuple[Group | None, frozenset[str], bool] = (None, frozenset(), False)

    @property
    def alive(self) -> frozenset[str]:
        """All nodes but the dead ones; the same value again as long as nothing has changed."""
        others = self._nodes[1]
        if self._alive[0] is not others or self._alive[1] != self._dead:
            self._alive = others, self._dead, (others | {self._me.id}) - self._dead
        return self._alive[2]

    @property
    def dead(self) -> frozenset[str]:
        """The nodes that this one watches, and whose heartbeats stand still."""
        return self._dead

    @property
    def moving(self) -> frozenset[str]:
        """The other nodes that have shown that they are alive, since this one watches them."""
        return self._failure_detector.moving

    def is_ours(self, group: Group) -> bool:
        """Whether it is the group of this node's run; of a group that does not say, it is."""
        return group.settings is None or group.settings.run == self.settings.run

    def poll(self) -> tuple[int | None, Group]:
        """Read the group and judge who is alive. Raises BackendFailed, GroupDamaged."""
        found, beats = self._read()
        version, there = (None, Group()) if found is None else (found[0], self._parse(found[1]))
        group = transitions.restore_lost_state(there, self.last_known)
        is_ours = self.is_ours(group)
        if is_ours and not group.open and group.generation < self._min_generation:
            # The backend is new, lost its state, or was last used before another one was. Were a
            # number given twice, a process that is left from the earlier generation of this number
            # would no longer be fenced, and the logs of that generation would be in the way.
            is_new = group.cause == transitions.START and not self.has_begun
            cause = transitions.NEW_RUN if is_new else group.cause
            group = replace(group, generation=self._min_generation, cause=cause)
        if is_ours:
            group = self._as_begun(group)
        self.has_begun = self.has_begun or (is_ours and group.open)
        # If the state is lost, this node may be the first to begin the next one.
        self._min_generation = max(self._min_generation, group.generation)
        now_s = self._clock.monotonic()
        self._observe_beats(group, now_s, beats)
        if self._partition_detector is not None:
            self._partition_detector.observe(group, now_s=now_s)
        alive = self.alive
        if self._is_enough[0] is not group or self._is_enough[1] is not alive:
            nodes = membership.next_members(group, alive=alive, policy=self._policy)
            self._is_enough = group, alive, len(nodes) >= self._policy.min_nodes
        self.timing = transitions.update_timing(
            self.timing,
            group,
            alive=alive,
            policy=self._policy,
            is_enough=self._is_enough[2],
            now_s=now_s,
        )
        first = next((node.id for node in chain(group.members, group.waiting) if node.id in alive), "")
        self.leads = first == self._me.id and group.settings == self.settings
        self.newest = group
        return version, group

    def number_from(self, newest: int, group: Group) -> Group:
        """The group, whose next generation is numbered after `newest` too."""
        self._min_generation = max(self._min_generation, newest)
        self.has_begun = self.has_begun or newest > 0
        group = self._as_begun(group)
        return group if group.open else replace(group, generation=max(group.generation, newest))

    def _as_begun(self, group: Group) -> Group:
        """The next generation of a run that has begun is no start, whatever its name was before."""
        is_resumed = self.has_begun and group.cause == transitions.NEW_RUN
        return replace(group, cause=transitions.RESUME) if is_resumed else group

    def begin_wait(self) -> None:
        """From the next poll on, the time in a group that cannot form counts."""
        self.timing = replace(self.timing, closed_since_s=None)

    def keep(self, group: Group) -> None:
        """Remember the newest state of the group, as far as this node knows."""
        self.newest, self.last_known = group, transitions.last_known_state(group)

    def _read(self) -> tuple[tuple[int, bytes] | None, dict[str, int] | None]:
        """The newest version; and heartbeats, if they are due and the backend reads both at once.

        They are those of the nodes that this one watched last, which it most often still does.
        """
        few = self._failure_detector.nodes.keys()
        if (
            isinstance(self._backend, ReadsWithBeats)
            and 0 < len(few) <= WATCHED
            and self._clock.monotonic() >= self._beats_due_s
        ):
            return self._backend.read_with_beats(few)
        return self._backend.read(), None

    def _parse(self, value: bytes) -> Group:
        if value != self._parsed[0]:
            # An empty value stands for versions that were all lost.
            self._parsed = value, Group.parse(value) if value else Group()
        return self._parsed[1]

    def _others(self, group: Group) -> frozenset[str]:
        """The nodes whose heartbeats count here."""
        if group is not self._nodes[0]:
            others = (group.member_ids | group.waiting_ids | membership.reported(group)) - {self._me.id}
            self._nodes = group, others
        return self._nodes[1]

    def _watched(self, group: Group, others: frozenset[str], now_s: float) -> frozenset[str]:
        """The nodes whose heartbeats this one reads now."""
        if self._suspects():
            self._watches_all_until_s = now_s + WATCHES_ALL_FOR * self.settings.keep_alive_s
        if now_s < self._watches_all_until_s or group.settings != self.settings:
            return others
        if self._few[0] is not group:
            self._few = group, watched_by(self._me.id, others)
        return self._few[1]

    def _suspects(self) -> bool:
        """Whether some node gives no sign."""
        if self._partition_detector is not None and self._partition_detector.suspects:
            return True
        return self._longest_silence_s > SUSPECTED_AFTER * self.settings.keep_alive_s

    def _observe_beats(self, group: Group, now_s: float, read: dict[str, int] | None) -> None:
        """read: the heartbeats of the nodes that were watched last, if they have just been read."""
        others, keep_alive_s = self._others(group), self.settings.keep_alive_s
        watched = self._watched(group, others, now_s)
        if group.settings is not None:
            # A node with a longer keep-alive sends heartbeats less often.
            keep_alive_s = max(keep_alive_s, group.settings.keep_alive_s)
        # A node that is new here is alive only once it has been observed.
        if now_s < self._beats_due_s and watched == self._failure_detector.nodes.keys():
            return
        pause_s = keep_alive_s / BEATS_READ_PER_KEEP_ALIVE
        if watched == others:
            pause_s = min(pause_s, len(others) * BEATS_READ_S_PER_NODE)
        self._beats_due_s = now_s + pause_s
        is_read = read is not None and watched == self._failure_detector.nodes.keys()
        beats = read if read is not None and is_read else self._backend.beats(watched)
        # If this node cannot send heartbeats (the disk that they share is full), the others most
        # likely cannot either, and their silence must not count.
        detector = replace(self._failure_detector, keep_alive_s=keep_alive_s).observe(
            {name: beats.get(name, NO_HEARTBEAT) for name in watched},
            now_s=now_s,
            counts=not self._heartbeat.problem,
        )
        self._failure_detector, self._dead = detector, watched - detector.alive
        self._longest_silence_s = max((each.silence.seconds for each in detector.nodes.values()), default=0.0)


def watched_by(me: str, nodes: frozenset[str]) -> frozenset[str]:
    """nodes: all that the group names, with `me` or without it."""
    others = nodes - {me}
    if len(others) < ALL_WATCH_ALL:
        return others
    ring = _ring(others | {me})
    after = bisect_right(ring, place(me), key=place)
    return frozenset(ring[(after + step) % len(ring)] for step in range(WATCHED)) - {me}


@lru_cache(maxsize=8)
def _ring(nodes: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(nodes, key=place))
