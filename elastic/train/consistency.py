"""Ranks that hold different states are stopped, all of them, with the name of the first difference.

What follows is decided by what the steps, done again, bring (divergence.py). The first time, the
workers end for their agents to begin again from the last agreed state. If the ranks differ again in
steps that are done again, it is the recipe, and the run ends. It does not find a difference that
all ranks share, such as a wrong sum of gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from elastic.divergence import Divergence, is_repeated, vote_of
from elastic.errors import RecipeNotExact, StatesDiffer
from elastic.events import DivergenceDetected, DivergenceJudged
from elastic.observe.log import EventLog
from elastic.train.flat_state import StateChecksum
from elastic.train.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compares the ranks of one generation. node: this rank's. log: on rank 0 alone."""

    groups: ProcessGroups
    node: str
    generation: int
    log: EventLog | None

    def check_same_state(
        self, checksum: StateChecksum, when: str, *, step: int, known: Divergence | None
    ) -> None:
        """Every rank passes the checksum of the state of `step` that it begins with.

        known: the difference because of which this step is begun with again. Raises StatesDiffer or
        RecipeNotExact on every rank unless they are equal.
        """
        votes = self.groups.all_gather(vote_of(checksum.whole))
        if len(set(votes)) > 1:
            self.raise_difference(checksum, votes, when, step=step, agreed=step, known=known)

    def raise_difference(
        self,
        checksum: StateChecksum,
        votes: Sequence[int],
        when: str,
        *,
        step: int,
        agreed: int,
        known: Divergence | None,
    ) -> NoReturn:
        """Every rank knows by the votes, in rank order, that they differ after `step`.

        checksum: of this rank's state, to find the entry.
        """
        details = self.groups.all_gather(checksum.entries)
        names = sorted({name for of_rank in details for name in of_rank})
        different = [name for name in names if len({of_rank.get(name) for of_rank in details}) > 1]
        entry = different[0] if different else ""
        alike = [
            [rank for rank, of_rank in enumerate(votes) if of_rank == vote] for vote in dict.fromkeys(votes)
        ]
        # Before step 1 the script alone has made the objects: no machine is blamed.
        is_recipe = step == 0 or is_repeated(known, step)
        if self.log is not None:
            self.log.record(DivergenceDetected(step=step, entry=entry, ranks=alike))
            if is_recipe:
                self.log.record(DivergenceJudged(step=step, entry=entry, nodes=[], verdict="recipe"))
        # Only now may another rank end: its agent kills those of its node that have not.
        nodes = tuple(self.groups.all_gather(self.node))
        found = (
            f"{when}: expected the same training state on every rank, found {len(alike)} different ones "
            f"(ranks {' | '.join(map(str, alike))}); {_entry_text(entry, len(different))}"
        )
        if is_recipe:
            raise RecipeNotExact(f"{found}. {_recipe_text(step, known)}")
        raise StatesDiffer(
            f"{found}. {_redo_text(step, agreed)}",
            Divergence(
                generation=self.generation,
                step=step,
                agreed=agreed,
                entry=entry,
                votes=tuple(votes),
                nodes=nodes,
            ),
        )


def _entry_text(entry: str, count: int) -> str:
    if not entry:
        return "no entry differs any more; or they differ in a number that the loop sets in its dataset"
    return f"the first entry that differs is {entry} ({count} in all)"


def _redo_text(step: int, agreed: int) -> str:
    if step == agreed:
        return "It is loaded once more"
    return f"The last state that all ranks agreed on is that of step {agreed}; from there the steps are done again"


def _recipe_text(step: int, known: Divergence | None) -> str:
    if step == 0 or known is None:
        return (
            "Every rank must build its objects alike, from the run's seed (after elastic.start) or from the same files. A file that the script "
            "makes itself if it is missing is read by other ranks before it is whole, and changes which random numbers are drawn next: make it "
            "by another command, before this one"
        )
    return (
        f"Ranks differed after step {known.step} as well, and the steps since {known.agreed} were done again from one state: "
        "this recipe's result depends on more than its state, its data and the run's seed. Such recipes draw random numbers "
        "from a generator of their own or from the time, branch on the rank or the process, change parameters or Python "
        "values in forward, or go through a set; draw from torch's or Python's global generators, keep what lives "
        "from step to step in an object of the State, and sort sets. (A machine that is wrong every time looks the same.)"
    )
