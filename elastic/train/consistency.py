"""Ranks never go on with different states: their checksums are compared, and a difference names the first tensor that differs."""

from collections.abc import Callable

from elastic.errors import StatesDiffer
from elastic.train.process_groups import ProcessGroups
from elastic.train.state import FlatState, checksums


def check_same_state(world: ProcessGroups, parts: FlatState, when: str) -> None:
    """Raises StatesDiffer on every rank when their states are not the same."""
    check_same_checksums(world, *checksums(parts), when)


def check_same_snapshots(
    world: ProcessGroups, kept: str | None, parts: Callable[[], FlatState], when: str
) -> None:
    """The same, without another pass over states that every rank has in memory.

    kept: the checksum of the snapshot of this state, None where this rank took none. Where those differ, what is trained decides, and names the entry.
    """
    everyone = world.gather(kept)
    if None in everyone or len(set(everyone)) > 1:
        check_same_state(world, parts(), when)


def check_same_checksums(world: ProcessGroups, checksum: str, entries: dict[str, str], when: str) -> None:
    """The same, from what `checksums` says of this rank's state."""
    everyone = world.gather(checksum)
    if len(set(everyone)) == 1:
        return
    details = world.gather(entries)
    different = [name for name in sorted(details[0]) if len({of_rank.get(name) for of_rank in details}) > 1]
    groups: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(everyone):
        groups.setdefault(of_rank, []).append(rank)
    raise StatesDiffer(
        f"{when}: expected the same training state on every rank, found {len(groups)} different ones "
        f"(ranks {' | '.join(str(ranks) for ranks in groups.values())}); the first entry that differs is {different[0] if different else '?'} "
        f"({len(different)} in all). Every rank must build its objects alike, from the run's seed or the same files"
    )
