"""A node's changes get into the group by compare-and-set, alone or with those of other nodes.

If a thousand nodes wrote themselves into the group at once, each version would have one winner, and
all others would try again: half a million tries, each with the whole group in it. So a node of a
wide group shows a short request with its heartbeats first and pauses for a random time. If its
change is not in the group by then, the node writes it, and with it, in one version, those of all
requests that it finds, by the transitions as they are. No node has a part of its own in this, so
none is missed when it dies. (The idea is that of flat combining: Hendler, Incze, Shavit and
Tzafrir, 2010.) A request names the group and generation that it is about, so that it is void in the
next.

It does not promise that a change is made once: one whose outcome is unknown is tried again, and
transitions are such that this does no harm.
"""

import json
import random
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from zlib import crc32

from elastic.rendezvous import transitions
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.heartbeat import request_of
from elastic.rendezvous.membership import width
from elastic.rendezvous.observer import GroupObserver
from elastic.system.untrusted import decode, encode

CHANGE_TRIES = 200
COMBINES_FROM = 7  # nodes; of fewer each writes for itself at once: `python benchmarks/scale.py`
# After a lost compare-and-set a node waits up to this at random, and twice as long after each
# further one: of many nodes that write at once, few then try at the same time.
BACKOFF_S = 0.002
LONGEST_BACKOFF_S = 0.5
# After a request a node waits at random, up to this for each node of the group: of all that want
# something at one moment a few write.
CALL_S = 0.001  # what a call is taken to last at least
CALLS_PER_NODE = 0.2
# Caps: where --max-nodes stands for an unknown number, few nodes do not wait as many would.
LONGEST_WAIT_S = 1.0
LONGEST_OF_KEEP_ALIVE = 0.5


class Verb(Enum):
    JOIN = "join"
    DONE = "done"
    WITHDRAW = "withdraw"  # other members have the node's newest state


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """about: the group and generation in which the node wants it."""

    verb: Verb
    about: str
    node: Node


def request_text(verb: Verb, group: Group, node: Node) -> str:
    return json.dumps(encode(Request(verb=verb, about=_about(group), node=node)))


def _about(group: Group) -> str:
    """A request is void in another generation, and once nodes with other settings have taken the
    group over: they keep the number of its generation.
    """
    return f"{group.generation}.{crc32(repr(group.settings).encode()):08x}"


def granted(
    group: Group, requests: Mapping[str, str], *, dead: AbstractSet[str], is_member: bool = True
) -> Group:
    """The group with what live nodes request of its generation, by node id.

    Those of one moment come in the order of their names, which gives neighbours neighbouring ranks.
    is_member: whether the writer is one. A newcomer takes members for alive that it has just begun
    to watch, and a node that withdraws would leave its state to them. A member that writes is
    itself alive, and keeps the state.
    """
    about = _about(group)
    for name, text in sorted(requests.items()):
        match None if name in dead else _parsed(name, text, about):
            case Request(verb=Verb.JOIN, node=node):
                group = transitions.join(group, node)
            case Request(verb=Verb.DONE):
                group = transitions.done(group, generation=group.generation, node_id=name)
            case Request(verb=Verb.WITHDRAW) if is_member:
                group = transitions.withdraw(group, name, alive=group.member_ids - dead, is_shared=True)
            case _:
                pass
    return group


def _parsed(name: str, text: str, about: str) -> Request | None:
    """None for another group, and for anything but a request: any process can write there."""
    with suppress(ValueError):
        request = decode(Request, text, what="request")
        if request.about == about and request.node.id == name:
            return request
    return None


class GroupWriter:
    """pause_s: how long to wait before the next poll, drawn at random, so that the nodes of a group
    do not write at the same moment.
    """

    def __init__(self, observer: GroupObserver) -> None:
        """observer: of the node that writes."""
        self.pause_s = 0.0
        self._observer, self._backend, self._me = observer, observer.backend, observer.me
        self._longest_s = min(LONGEST_WAIT_S, observer.settings.keep_alive_s * LONGEST_OF_KEEP_ALIVE)
        self._lost_tries = 0  # of compare-and-set, in a row
        self._request = ""  # what this node has left, or may have left
        self._may_be_written = False  # a node that has read it may be about to write

    def set(self, version: int | None, group: Group) -> bool:
        """Make `group` the successor of `version` unless another node was faster."""
        is_set = self._backend.compare_and_set(version, group.to_json())
        if is_set:
            self._observer.newest = group
        self._lost_tries = 0 if is_set else self._lost_tries + 1
        longest_s = min(BACKOFF_S * 2.0**self._lost_tries, LONGEST_BACKOFF_S) if self._lost_tries else 0.0
        self.pause_s = longest_s * random.random()  # noqa: S311
        return is_set

    def evict(self, version: int | None, group: Group, *, step: int = 0) -> Group | None:
        """Try to remove the dead nodes; None if another node was faster."""
        evicted = transitions.evict(group, alive=self._observer.alive, step=step)
        return evicted if self.set(version, evicted) else None

    def join(self, version: int | None, group: Group) -> None:
        """Try to wait for the next generation, or let another node write that for a moment."""
        # Heartbeat first, then the name: otherwise the others could see a node without a heartbeat
        # and count its silence.
        if not self._lost_tries and not self._request:
            self._observer.heartbeat.beat()
        if not self._leave_request(Verb.JOIN, group):
            self.set(version, transitions.join(self._with_others(group), self._me))

    def change(
        self,
        transition: Callable[[Group], Group],
        verb_in: Callable[[Group], Verb | None] = lambda _group: None,
    ) -> Group:
        """Try `transition` until its compare-and-set wins; BackendFailed after CHANGE_TRIES.

        verb_in: what another node may write in a group for this one.
        """
        # A node that has read an earlier request, as that to join, may be about to write it. It
        # cannot once the version that it read is not the newest, and who reads a later version
        # finds no request. So this node writes a version, also where it changes nothing. That is
        # remembered where a call fails in between: the next try needs it, too.
        self._may_be_written = self._may_be_written or bool(self._request)
        self._cancel()
        for _ in range(CHANGE_TRIES):
            version, group = self._observer.poll()
            changed = transition(group)
            is_done = changed == group and not self._may_be_written
            verb = None if changed == group else verb_in(group)
            if verb is not None and self._leave_request(verb, group):
                self._observer.clock.sleep(self.pause_s)
                continue
            if verb is not None:
                changed = transition(self._with_others(group))
            if is_done or self.set(version, changed):
                self._may_be_written = False
                self.take_back()
                return changed
            self._observer.clock.sleep(self.pause_s)
        raise BackendFailed(
            f"the group's state changed under {self._me.id} {CHANGE_TRIES} times in a row; try again"
        )

    def take_back(self) -> None:
        """What this node wanted is done, or not wanted any more. Tried again if it fails."""
        with suppress(BackendFailed):
            self._cancel()

    def _cancel(self) -> None:
        if self._request:
            self._observer.heartbeat.ask("")
            self._request = ""

    def _leave_request(self, verb: Verb, group: Group) -> bool:
        """Leave a request in a wide group; whether it is a new one, and this node is to pause."""
        text = request_text(verb, group, self._me)
        if not self._is_wide(group) or text == self._request:
            return False
        began_s = self._observer.clock.monotonic()
        # A call that fails may have left the request all the same, to be taken back.
        self._request = text
        try:
            self._observer.heartbeat.ask(text)
        except BackendFailed:
            # A folder may have no room: then this node writes.
            return False
        call_s = max(CALL_S, self._observer.clock.monotonic() - began_s)
        spread_s = min(width(group, self._observer.policy) * CALLS_PER_NODE * call_s, self._longest_s)
        self.pause_s = spread_s * random.random()  # noqa: S311
        return True

    def _with_others(self, group: Group) -> Group:
        """The group with all that is requested; without, if requests cannot be read."""
        shown: dict[str, str] = {}
        with suppress(BackendFailed):
            shown = self._backend.shown() if self._is_wide(group) else {}
        requests = {name: request_of(text) for name, text in shown.items()} | {self._me.id: self._request}
        is_member = self._me.id in group.member_ids
        return granted(group, requests, dead=self._observer.dead, is_member=is_member)

    def _is_wide(self, group: Group) -> bool:
        """Whether nodes combine their writes in this group."""
        return width(group, self._observer.policy) >= COMBINES_FROM
