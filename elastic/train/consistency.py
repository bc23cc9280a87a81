"""Ranks compare their states before they save, drain or begin, and name the first difference.

A difference raises on every rank. That is a failure like any other: a new generation restores one
state on all ranks, perhaps one of those that differed. It does not find a difference earlier than
the next comparison, nor one that all ranks share, such as a wrong kernel: they agree on its result.
"""

from collections.abc import Callable

from elastic.errors import StatesDiffer
from elastic.train.process_groups import ProcessGroups
from elastic.train.state import FlatState, StateChecksum, checksum_of


def check_same_snapshots(
    groups: ProcessGroups, checksum: str | None, flatten: Callable[[], FlatState], when: str
) -> None:
    """As `check_same_state`, without a pass over the state if every rank has a snapshot of it.

    checksum: that of the snapshot of this state, None where this rank took none. If the snapshots'
    checksums differ, the states themselves decide, and name the entry: only a copy may be wrong.
    """
    checksums = groups.all_gather(checksum)
    if None in checksums or len(set(checksums)) > 1:
        check_same_state(groups, checksum_of(flatten()), when)


def check_same_state(groups: ProcessGroups, checksum: StateChecksum, when: str) -> None:
    """Raises StatesDiffer on every rank unless all ranks pass the checksum of the same state."""
    checksums = groups.all_gather(checksum.whole)
    if len(set(checksums)) == 1:
        return
    details = groups.all_gather(checksum.entries)
    different = [name for name in sorted(details[0]) if len({of_rank.get(name) for of_rank in details}) > 1]
    ranks_with: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(checksums):
        ranks_with.setdefault(of_rank, []).append(rank)
    raise StatesDiffer(
        f"{when}: expected the same training state on every rank, found {len(ranks_with)} different ones "
        f"(ranks {' | '.join(str(ranks) for ranks in ranks_with.values())}); the first entry that differs is {different[0] if different else '?'} "
        f"({len(different)} in all). Every rank must build its objects alike, from the run's seed or the same files"
    )
