"""All nodes of a group were given the same run and the same rules, or they do not meet.

The rules that must be equal are those that every node applies to every other: who is dead
(`keep_alive_s`) and how large a generation is (`min_nodes`, `max_nodes`). With different ones, each
node would undo what another one had decided, and the group would close and form without end. How
long a node waits for others concerns that node alone, and is not compared.
"""

from dataclasses import dataclass, field
from typing import Annotated

from elastic.system.untrusted import Count, bounds, pattern

LONGEST_NAME = 255

Name = Annotated[
    str,
    # No control character, and none that reorders what a terminal shows.
    pattern(
        rf"[^\x00-\x1f\x7f-\xa0\xad\u061c\u200b-\u200f\u2028-\u202f\u205f-\u206f\ufeff\ud800-\udfff]{{0,{LONGEST_NAME}}}",
        f"a printable name of at most {LONGEST_NAME} characters",
    ),
]
_Seconds = Annotated[float, bounds(lowest=0, below=10**12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Which run a node takes part in.

    run_id: equal for two runs that are begun with the same command; empty for a script without the
    library. uid: random, of the run directory; empty where there is none, as under torchrun. title:
    for messages only. The text of a value has the fields that are compared.
    """

    run_id: Name = ""
    uid: Name = ""
    title: Name = field(default="", compare=False, repr=False)


ANY_RUN = RunKey()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSettings:
    run: RunKey
    min_nodes: Annotated[int, bounds(lowest=1, below=10**9)]
    max_nodes: Count
    keep_alive_s: _Seconds


def refusal(theirs: SharedSettings, mine: SharedSettings) -> str:
    """Why a node with `mine` may not join the live nodes of a group with `theirs`, which differ."""
    if theirs.run.run_id != mine.run.run_id:
        return (
            f"this group is training another run: {theirs.run.title} there, {mine.run.title} here;"
            " give another --rdzv-id or --rdzv-endpoint, or stop the others first"
        )
    if theirs.run.uid != mine.run.uid:
        return (
            "the run directory is not shared: the nodes of this group have the same run in another directory"
            f" ({theirs.run.title} there, {mine.run.title} here); give all nodes a --run-dir in a folder that they share, or a URL."
            " If this is to be a run of its own, give another --rdzv-id or --rdzv-endpoint"
        )
    differences = "; ".join(
        f"{flag} {there:g}{unit} there, {here:g}{unit} here"
        for flag, unit, there, here in (
            ("--min-nodes", "", theirs.min_nodes, mine.min_nodes),
            ("--max-nodes", "", theirs.max_nodes, mine.max_nodes),
            ("--keep-alive", "s", theirs.keep_alive_s, mine.keep_alive_s),
        )
        if there != here
    )
    return (
        f"the nodes of this group were given other settings: {differences};"
        " give this node the same, or stop the others first and start all with the new ones"
    )
