"""A node looks at the group of its place before it joins, and changes nothing if it may not.

Until then it sends no heartbeats either, so that the group's nodes take it for no newcomer.
"""

from dataclasses import replace
from enum import Enum

from elastic.errors import UsageError
from elastic.rendezvous.group import Group
from elastic.rendezvous.observer import GroupObserver
from elastic.rendezvous.shared_settings import refusal
from elastic.system.clock import Clock

POLL_S = 0.1


class Holder(Enum):
    """What the group in this place shows of the nodes that have a lease of the run directory."""

    ELSEWHERE = "the group meets under another lease, or under none"
    SILENT = "it meets under this one, and none of its nodes is alive"
    ALIVE = "it meets under this one, and some of its nodes are alive"


class FirstLook:
    """Every method may raise BackendFailed."""

    def __init__(self, observer: GroupObserver, me: str, clock: Clock) -> None:
        self._observer = observer
        self._me = me
        self._clock = clock

    def holder(self, token: str) -> Holder:
        """Of the lease with this token, as of now. A node that is new here counts as alive."""
        group = self._observer.poll()[1]
        if group.settings is None or group.settings.lease != token:
            return Holder.ELSEWHERE
        return Holder.ALIVE if self._is_alive(group) else Holder.SILENT

    def check_settings(self) -> None:
        """Return once no live node of the group is of another run or has other rules.

        Their leases are not compared. Raises UsageError when one is alive.
        """
        while True:
            group, mine = self._observer.poll()[1], self._observer.settings
            theirs = group.settings
            if theirs is not None:
                mine = replace(mine, lease=theirs.lease)
            if theirs == mine or group.ended is not None or not self._is_alive(group):
                return
            if self._observer.moving:
                raise UsageError(refusal(theirs, mine))
            self._clock.sleep(POLL_S)

    def _is_alive(self, group: Group) -> bool:
        nodes = (group.member_ids | group.waiting_ids) - {self._me}
        return not nodes.isdisjoint(self._observer.alive)
