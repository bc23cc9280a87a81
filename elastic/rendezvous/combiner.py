"""One node's part in combined writes: its own request, and when it writes itself.

`requests` says what that is for. The wait is drawn at random and grows with the group and with the
time that a call takes, so that of all nodes that want something at one moment a few write.
"""

import random
from collections.abc import Callable
from contextlib import suppress

from elastic.rendezvous.backends.backend import Backend, BackendFailed, CollectsRequests
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.observer import GroupObserver
from elastic.rendezvous.requests import Request, Verb, apply_all, width
from elastic.system.clock import Clock

CALL_S = 0.001  # what a call is taken to last at least
CALLS_PER_NODE = 0.2
# Where the policy's limit stands for a number that is not known, no few nodes wait for long.
LONGEST_S = 1.0
LONGEST_OF_KEEP_ALIVE = 0.5


class Combiner:
    def __init__(  # noqa: PLR0913 - one node's hand in the group
        self,
        backend: Backend,
        me: Node,
        policy: GroupPolicy,
        observer: GroupObserver,
        *,
        keep_alive_s: float,
        clock: Clock,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw`: random numbers from 0 to 1."""
        self._backend = backend
        self._me = me
        self._policy = policy
        self._observer = observer
        self._longest_s = min(LONGEST_S, keep_alive_s * LONGEST_OF_KEEP_ALIVE)
        self._clock = clock
        self._draw = draw
        self._own: Request | None = None
        self._call_s = CALL_S
        self._due_s: float | None = None

    def is_for(self, group: Group) -> bool:
        """Whether nodes combine their writes in this group."""
        is_able = isinstance(self._backend, CollectsRequests)
        return is_able and width(group, self._policy) >= self._requests.combines_from

    @property
    def wait_s(self) -> float:
        """How long until this node is to write; infinite if it waits for nothing."""
        return float("inf") if self._due_s is None else max(0.0, self._due_s - self._clock.monotonic())

    @property
    def is_joining(self) -> bool:
        """Whether another node may be about to write that this one joins."""
        return self._own is not None and self._own.verb is Verb.JOIN

    def request(self, group: Group, request: Request) -> bool:
        """Leave it unless it is there; returns whether this node is to write now."""
        if self._own != request:
            began_s = self._clock.monotonic()
            # A call that fails may have left the request all the same, to be taken back.
            self._own, self._due_s = request, None
            try:
                self._requests.request(self._me.id, request.text)
            except BackendFailed:
                # A folder may have no room, or none for so long a name: then this node writes,
                # whatever it has requested.
                self._due_s = began_s
            else:
                self._call_s = max(CALL_S, self._clock.monotonic() - began_s)
        return self.is_due(group)

    def is_due(self, group: Group) -> bool:
        """Whether this node has waited for its random time, which otherwise begins now."""
        if self._due_s is None:
            spread_s = width(group, self._policy) * CALLS_PER_NODE * self._call_s
            self._due_s = self._clock.monotonic() + min(spread_s, self._longest_s) * self._draw()
        return self._clock.monotonic() >= self._due_s

    def with_all(self, group: Group, own: Request) -> Group:
        """The group with what this node and the others have requested; with its own alone if
        requests cannot be read.
        """
        texts: dict[str, str] = {}
        with suppress(BackendFailed):
            texts = self._requests.requests()
        found = (Request.parse(name, text, group) for name, text in texts.items())
        others = [each for each in found if each is not None and each.node.id != self._me.id]
        if self._me.id not in group.member_ids:
            # A newcomer takes members for alive that it has just begun to watch, and the node that
            # withdraws would leave its state to them. Of a member's belief it may be sure of one:
            # the member that writes is alive.
            others = [each for each in others if each.verb is not Verb.WITHDRAW_SHARED]
        return apply_all(group, [own, *others], dead=self._observer.dead)

    def take_back_of_dead(self) -> None:
        """The next writer may be new here, and would put them into the group again."""
        with suppress(BackendFailed):
            for name in self._observer.dead & self._requests.requests().keys():
                self._requests.request(name, "")

    def has_lost(self) -> None:
        """Another node was faster; what this one wants may be in what that one wrote."""
        self._due_s = None

    def take_back(self) -> None:
        """What this node wanted is done, or not wanted any more. Tried again if it fails."""
        with suppress(BackendFailed):
            self.cancel()

    def cancel(self) -> None:
        """Take back what this node wanted. Raises BackendFailed: others may still find it."""
        self._due_s = None
        if self._own is not None:
            self._requests.request(self._me.id, "")
            self._own = None

    @property
    def _requests(self) -> CollectsRequests:
        assert isinstance(self._backend, CollectsRequests)
        return self._backend
