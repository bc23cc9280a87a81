"""Many nodes leave their changes beside the group, and one of them writes those of all.

If a thousand nodes write themselves into the group at once, each version has one winner and all
others try again: half a million tries, each with the whole group in it. So a node leaves a short
request first and waits for a random time. If its change is not in the group by then, it writes it,
and with it, in one version, those of all requests that it finds, by the transitions as they are.
No node has a part of its own in this, so none is missed when it dies. (The idea is that of flat
combining: Hendler, Incze, Shavit and Tzafrir, 2010.)

A request names the settings of the group and the generation that it is about, so that one that a
dead process left behind does not take effect later. To ask twice is to ask once.

It does not promise that a request is answered: the node that left it writes it after its wait.
"""

import hashlib
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from elastic.rendezvous import transitions
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.shared_settings import SharedSettings
from elastic.system.untrusted import encode, fits, parse_number


class Verb(Enum):
    JOIN = "join"
    DONE = "done"
    LEAVE = "leave"
    WITHDRAW = "withdraw"
    WITHDRAW_SHARED = "withdraw-shared"  # other members have the node's newest state


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    verb: Verb
    node: Node
    generation: int
    settings: str  # of `settings_digest`

    @property
    def text(self) -> str:
        """Short, because some backends keep it in the name of a file."""
        node = self.node
        about = f"{self.generation} {self.settings}"
        return f"{self.verb.value} {about} {node.nproc} {node.port} {node.address}"

    @staticmethod
    def parse(node_id: str, text: str, group: Group) -> "Request | None":
        """None for other settings or another generation, and for anything but a request."""
        match text.split(" ", 5):
            case [verb, number, settings, nproc_text, port_text, address]:
                nproc, port = parse_number(nproc_text), parse_number(port_text)
            case _:
                return None
        if verb not in _VERBS or nproc is None or port is None:
            return None
        if parse_number(number) != group.generation or settings != settings_digest(group.settings):
            return None
        node = Node(id=node_id, address=address, nproc=nproc, port=port)
        if not fits(encode(node), Node):
            return None  # with it in the group, no node could read the group
        return Request(verb=Verb(verb), node=node, generation=group.generation, settings=settings)

    def apply(self, group: Group, *, dead: AbstractSet[str]) -> Group:
        """dead: the nodes that the writer takes for dead; what they had requested is void."""
        node = self.node
        is_about = self.generation == group.generation and self.settings == settings_digest(group.settings)
        if not is_about or node.id in dead:
            return group
        match self.verb:
            case Verb.JOIN:
                return transitions.join(group, node)
            case Verb.DONE:
                return transitions.done(group, generation=self.generation, node_id=node.id)
            case Verb.LEAVE:
                return transitions.leave(group, node.id)
            case Verb.WITHDRAW | Verb.WITHDRAW_SHARED:
                is_shared, alive = self.verb is Verb.WITHDRAW_SHARED, group.member_ids - dead
                return transitions.withdraw(group, node.id, alive=alive, is_shared=is_shared)


_VERBS = frozenset(verb.value for verb in Verb)


@lru_cache(maxsize=8)
def settings_digest(settings: SharedSettings | None) -> str:
    """A digest of the run and its rules. Who takes a group over keeps the number of its
    generation, and those that it does not admit may have left requests.
    """
    if settings is None:
        named: tuple[str | int | float, ...] = ()
    else:
        run, keep_alive_s = settings.run, float(settings.keep_alive_s)
        rules = settings.min_nodes, settings.max_nodes, keep_alive_s
        named = (run.run_id, run.uid, *rules)
    return hashlib.blake2b(repr(named).encode(), digest_size=4).hexdigest()


def apply_all(group: Group, requests: Iterable[Request], *, dead: AbstractSet[str]) -> Group:
    """Those of one moment come in the order of their nodes' names, which gives neighbours
    neighbouring ranks.
    """
    for request in sorted(requests, key=lambda each: each.node.id):
        group = request.apply(group, dead=dead)
    return group


def width(group: Group, policy: GroupPolicy) -> int:
    """How many nodes may want to write at once. Before the first generation of a start that is not
    known, and the policy's limit stands for it.
    """
    named = len(group.members) + len(group.waiting)
    return named if group.members else max(named, policy.max_nodes)
