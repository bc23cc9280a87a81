"""A poll costs little while nothing changes: each version is parsed once, and heartbeats are read
at a pace of their own.

The observer is what one node knows of the group: the newest state, which nodes it believes alive,
and since when it waits. It changes nothing.

It does not promise that the state is current when the caller acts on it: compare-and-set decides.
"""

from dataclasses import dataclass, field, replace

from elastic.rendezvous import membership, transitions
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.failure_detector import FailureDetector
from elastic.rendezvous.group import Group, Node, SharedSettings
from elastic.rendezvous.heartbeat import Heartbeat, counter_of
from elastic.rendezvous.partition import ring
from elastic.rendezvous.reachability import PartitionDetector
from elastic.system.clock import Clock

# A node that watches all N reads heartbeats every N times this: a small group sees at once that a
# keep-alive is over.
BEATS_READ_S_PER_NODE = 0.004
BEATS_READ_PER_KEEP_ALIVE = 8  # others so often in a keep-alive
# If each node read the heartbeats of all others, a group of N nodes would read N² all the time. Up
# to ALL_WATCH_ALL nodes do so. In a larger group each reads those of the next WATCHED nodes in the
# ring of partition.py, so each node is watched by as many, wherever it stands in rank order. A
# node that finds one of them silent watches all nodes until none is. A death is then found after
# one keep-alive, as in a small group, unless all that watch a node die with it: then the nodes that
# watch those find it, half a keep-alive later. A node that is not watched is presumed alive.
ALL_WATCH_ALL = 16
WATCHED = 4
# In keep-alive periods: how long a silence makes a node watch all, and for how long it does then.
SUSPECTED_AFTER = 0.5
WATCHES_ALL_FOR = 2.0


@dataclass(kw_only=True)
class GroupObserver:
    """One node's eyes on everything outside it.

    `dead`: the nodes that this one watches, and whose heartbeats have stood still for a keep-alive;
    `alive`: every other node that the group names, and this one. `min_generation`, `has_begun`:
    known from the run directory; see Rendezvous.
    """

    backend: Backend
    me: Node
    policy: membership.GroupPolicy
    settings: SharedSettings
    heartbeat: Heartbeat
    clock: Clock
    min_generation: int
    has_begun: bool
    partition_detector: PartitionDetector | None
    dead: frozenset[str] = frozenset()
    timing: transitions.Timing = field(init=False)
    _beats_due_s: float = float("-inf")
    _watches_all_until_s: float = float("-inf")

    def __post_init__(self) -> None:
        self.newest = Group()
        self._parsed = b"", self.newest
        self.begin_wait()
        self._failure_detector = FailureDetector(keep_alive_s=self.settings.keep_alive_s)
        self.alive = frozenset({self.me.id})

    @property
    def moving(self) -> frozenset[str]:
        """The other nodes that have shown that they are alive, since this one watches them."""
        return self._failure_detector.moving

    def is_ours(self, group: Group) -> bool:
        """Whether it is the group of this node's run; of a group that does not say, it is."""
        return group.settings is None or group.settings.run == self.settings.run

    def poll(self) -> tuple[int | None, Group]:
        """Read the group and judge who is alive. Raises BackendFailed, GroupDamaged."""
        found = self.backend.read()
        version, group = (None, Group()) if found is None else (found[0], self._parse(found[1]))
        if self.is_ours(group):
            group = transitions.count_on(group, self.min_generation, has_begun=self.has_begun)
            self.has_begun = self.has_begun or group.open
        # If the state is lost, this node may be the first to begin the next one.
        self.min_generation = max(self.min_generation, group.generation)
        now_s = self.clock.monotonic()
        self._observe_beats(group, now_s)
        if self.partition_detector is not None:
            self.partition_detector.observe(group, now_s=now_s)
        self.timing = transitions.update_timing(
            self.timing, group, alive=self.alive, policy=self.policy, now_s=now_s
        )
        self.newest = group
        return version, group

    def number_from(self, newest: int, group: Group) -> Group:
        """The group, whose next generation is numbered after `newest` too."""
        self.min_generation = max(self.min_generation, newest)
        self.has_begun = self.has_begun or newest > 0
        return transitions.count_on(group, self.min_generation, has_begun=self.has_begun)

    def begin_wait(self) -> None:
        """From now on the time in a group that cannot form counts."""
        now_s = self.clock.monotonic()
        self.timing = transitions.Timing(now_s=now_s, closed_since_s=now_s, enough_since_s=now_s)

    def _parse(self, value: bytes) -> Group:
        if value != self._parsed[0]:
            self._parsed = value, Group.parse(value)
        return self._parsed[1]

    def _observe_beats(self, group: Group, now_s: float) -> None:
        others = (group.member_ids | group.waiting_ids | membership.reported(group)) - {self.me.id}
        own_s = self.settings.keep_alive_s
        if self._suspects():
            self._watches_all_until_s = now_s + WATCHES_ALL_FOR * own_s
        is_all = now_s < self._watches_all_until_s or group.settings != self.settings
        watched = others if is_all else watched_by(self.me.id, others)
        # A node that was never observed would count as dead: look at once.
        if now_s >= self._beats_due_s or watched != self._failure_detector.nodes.keys():
            # A node with a longer keep-alive sends heartbeats less often.
            keep_alive_s = max(own_s, group.settings.keep_alive_s if group.settings else 0.0)
            pause_s = keep_alive_s / BEATS_READ_PER_KEEP_ALIVE
            if watched == others:
                pause_s = min(pause_s, len(others) * BEATS_READ_S_PER_NODE)
            self._beats_due_s = now_s + pause_s
            shown = self.backend.shown(watched)
            counters = {name: counter_of(shown.get(name, "")) for name in watched}
            detector = replace(self._failure_detector, keep_alive_s=keep_alive_s)
            # If this node cannot send heartbeats (the disk that they share is full), the others
            # most likely cannot either, and their silence must not count.
            self._failure_detector = detector.observe(
                counters, now_s=now_s, counts=not self.heartbeat.problem
            )
        self.dead = watched - self._failure_detector.alive
        self.alive = (others | {self.me.id}) - self.dead

    def _suspects(self) -> bool:
        """Whether some node gives no sign."""
        if self.partition_detector is not None and self.partition_detector.suspects:
            return True
        limit_s = SUSPECTED_AFTER * self.settings.keep_alive_s
        return any(node.silence_s > limit_s for node in self._failure_detector.nodes.values())


def watched_by(me: str, nodes: frozenset[str]) -> frozenset[str]:
    """nodes: all that the group names, with `me` or without it."""
    others = nodes - {me}
    if len(others) < ALL_WATCH_ALL:
        return others
    order = ring(others | {me})
    at = order.index(me)
    return frozenset(order[(at + step) % len(order)] for step in range(1, WATCHED + 1)) - {me}
