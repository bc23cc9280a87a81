"""From the same reports all nodes compute the same nodes to exclude, of which none could stay.

Nodes can meet through a folder, or through servers, that all of them reach while the network
between the nodes themselves is broken. Then every heartbeat goes on and every collective stands
still. Some nodes must go so that the others can train, and all nodes must agree which. They do so
without a further message: each applies this function to the reports in the group. Two nodes that
take other nodes for alive may differ for a moment; compare-and-set lets one of them form.

It does not promise that no smaller set would do for more than five nodes, nor that the nodes that
stay keep reaching each other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from elastic.rendezvous.probe_graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableReport:
    """`node` and each of `peers` cannot exchange packets in both directions."""

    node: str
    # The file keeps the key of the first version that wrote it.
    peers: tuple[str, ...]


def broken_links(reports: Iterable[UnreachableReport]) -> frozenset[frozenset[str]]:
    """The pairs of nodes of which at least one has reported the other."""
    pairs = ((report.node, peer) for report in reports for peer in report.peers)
    return frozenset(frozenset(pair) for pair in pairs if pair[0] != pair[1])


def nodes_to_exclude(
    order: Sequence[str], reports: Iterable[UnreachableReport], graph: Graph | None = None
) -> tuple[str, ...]:
    """The nodes of `order` without which all others in `order` reach each other, in this order.

    Links are edges of a graph, and the nodes that stay are an independent set: no two of them share
    a broken link. The largest such set is NP-hard to find, so this takes the usual greedy one: the
    node with the fewest broken links stays, those that it cannot reach go, and so on with the rest.
    The one node with the broken cable goes, because it is an end of every broken link. Among nodes
    with equally many broken links the first in `order` stays, so that rank 0 stays if it can. Of
    two nodes this keeps the first, though its own cable may be the broken one: the reports of two
    nodes cannot tell.

    graph: which nodes probe each other; None for all pairs. Of nodes that do not, a link is taken
    for broken where the probed links that work no longer lead from one to the other.
    """
    names, links = frozenset(order), broken_by_node(reports)
    broken = {name: links.get(name, set()) & names for name in order}
    if not any(broken.values()):
        return ()
    whole, part = _parts(order, broken, graph)
    # The links that are not already broken because their ends are in two parts of one whole.
    single = {
        name: {other for other in found if part[other] == part[name] or whole[other] != whole[name]}
        for name, found in broken.items()
    }
    stay, left = set[str](), list(order)
    while left:
        of_whole, of_part = Counter(whole[name] for name in left), Counter(part[name] for name in left)
        remaining = set(left)
        missing = {
            name: of_whole[whole[name]] - of_part[part[name]] + len(single[name] & remaining) for name in left
        }
        first = min(left, key=missing.__getitem__)
        # All that reach everything would be the next to stay, one after another.
        chosen = {name for name in left if not missing[name]} or {first}
        stay |= chosen
        is_cut = bool(missing[first])
        left = [
            name
            for name in left
            if name not in chosen
            and not (is_cut and (name in single[first] or _is_apart(name, first, whole, part)))
        ]
    return tuple(name for name in order if name not in stay)


def broken_by_node(reports: Iterable[UnreachableReport]) -> dict[str, set[str]]:
    """By node, those to which its link is broken; only nodes that have one."""
    found: dict[str, set[str]] = defaultdict(set)
    for one, other in map(tuple, broken_links(reports)):
        found[one].add(other)
        found[other].add(one)
    return found


def _parts(
    order: Sequence[str], broken: Mapping[str, AbstractSet[str]], graph: Graph | None
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """By node, the number of what it is connected with: had no link broken, and as it is now.

    The first matters where most nodes of a wide group are dead. Those that are left may no longer
    be connected by probes, which says nothing of the links between them.
    """
    if graph is None:
        return dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    return _components(order, graph, {}), _components(order, graph, broken)


def _components(
    order: Sequence[str], graph: Graph, without: Mapping[str, AbstractSet[str]]
) -> dict[str, int]:
    found: dict[str, int] = {}
    names = frozenset(order)
    for number, start in enumerate(order):
        if start in found:
            continue
        found[start], reached = number, [start]
        while reached:
            name = reached.pop()
            for other in graph.get(name, frozenset()) & names - without.get(name, set()):
                if other not in found:
                    found[other] = number
                    reached.append(other)
    return found


def _is_apart(one: str, other: str, whole: Mapping[str, int], part: Mapping[str, int]) -> bool:
    return whole[one] == whole[other] and part[one] != part[other]
