"""Ranks that hold different states are stopped, all of them, with the name of the first difference.

What follows is decided by what the steps, done again, bring (divergence.py). The first time, the
workers end for their agents to begin again from the last agreed state. If the ranks differ again in
steps that are done again, it is the recipe, and the run ends. So does a difference that comes as
many steps after the beginning as the one before it, which may be the recipe's or a machine's. It
does not find a difference that all ranks share, such as a wrong sum of gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from elastic.divergence import Divergence, is_repeated, may_come_as_late, vote_of
from elastic.errors import RecipeNotExact, StatesDiffer
from elastic.events import DivergenceDetected, DivergenceJudged
from elastic.observe.log import EventLog
from elastic.train.groups import ProcessGroups
from elastic.train.state.flat import StateChecksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Voted:
    """What ranks voted on: their states after `step`, which `when` says in words.

    agreed: the last step on which they agreed. began: the one with whose state the generation
    began. known: the difference because of which steps are done again.
    """

    when: str
    step: int
    agreed: int
    began: int
    known: Divergence | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compares the ranks of one generation.

    node: this rank's. log: on rank 0 alone. redo: the difference that ended the generation before,
    where this node knows of it.
    """

    groups: ProcessGroups
    node: str
    generation: int
    log: EventLog | None
    redo: Divergence | None = None

    def check_same_state(
        self, checksum: StateChecksum, when: str, *, step: int, known: Divergence | None
    ) -> None:
        """Every rank passes the checksum of the state of `step` that it begins with.

        known: the difference because of which this step is begun with again. Raises StatesDiffer or
        RecipeNotExact on every rank unless they are equal.
        """
        votes = self.groups.all_gather(vote_of(checksum.whole))
        if len(set(votes)) > 1:
            voted = Voted(when=when, step=step, agreed=step, began=step, known=known)
            self.raise_difference(checksum, votes, voted)

    def raise_difference(self, checksum: StateChecksum, votes: Sequence[int], voted: Voted) -> NoReturn:
        """Every rank knows by the votes, in rank order, that they differ after `voted.step`.

        checksum: of this rank's state, to find the entry.
        """
        step, agreed, known = voted.step, voted.agreed, voted.known
        details = self.groups.all_gather(checksum.entries)
        names = sorted({name for of_rank in details for name in of_rank})
        different = [name for name in names if len({of_rank.get(name) for of_rank in details}) > 1]
        entry = different[0] if different else ""
        alike = [
            [rank for rank, of_rank in enumerate(votes) if of_rank == vote] for vote in dict.fromkeys(votes)
        ]
        # Before step 1 the script alone has made the objects: no machine is blamed.
        is_recipe = step == 0 or is_repeated(known, step)
        is_late = may_come_as_late(self.redo, began=voted.began, agreed=agreed, step=step)
        is_unclear = any(self.groups.all_gather(is_late)) and not is_recipe
        if self.log is not None:
            self.log.record(DivergenceDetected(step=step, entry=entry, ranks=alike))
            if is_recipe:
                self.log.record(DivergenceJudged(step=step, entry=entry, nodes=[], verdict="recipe"))
        # Only now may another rank end: its agent kills those of its node that have not.
        nodes = tuple(self.groups.all_gather(self.node))
        found = (
            f"{entry or 'the state'} differs between ranks {' | '.join(map(str, alike))} {voted.when}"
            + f" ({len(different)} entries do)" * (len(different) > 1)
        )
        if is_unclear:
            raise RecipeNotExact(f"{found}. {_unclear_text(step - voted.began)}")
        if is_recipe:
            raise RecipeNotExact(f"{found}. {_recipe_text(step, different)}")
        redo = "it is loaded once more"
        if step != agreed:
            redo = f"all agreed up to step {agreed}, and what follows is done again"
        raise StatesDiffer(
            f"{found}; {redo}",
            Divergence(
                generation=self.generation,
                step=step,
                agreed=agreed,
                entry=entry,
                votes=tuple(votes),
                nodes=nodes,
                began=voted.began,
            ),
        )


def _unclear_text(steps: int) -> str:
    return (
        f"They differed {steps} steps after the last beginning too, or about that, and agreed when those steps were done again. So does a recipe that keeps "
        "something from step to step outside its State, which new processes lack; a machine that is often wrong looks the same. Which of the two it was "
        "cannot be told, and no machine leaves for it: elastic-train check RECIPE and --audit 1steps look for the first. The same command goes on from "
        "the newest checkpoint"
    )


def _recipe_text(step: int, different: Sequence[str]) -> str:
    """different: the entries. The batches that a step counts are the same number on all ranks."""
    if step == 0:
        return (
            "Every rank must build the same objects: from the run's seed after elastic.start, without a rank in it, "
            "and from files that another command has made"
        )
    if any(name.endswith("num_batches_tracked") for name in different):
        return (
            "A forward in training mode ran on some ranks only, as under `if run.is_first:`. Call it in evaluation mode "
            "(net.eval(), then net.train()), or on every rank"
        )
    return (
        "So it did when these steps were done again: the recipe draws from a generator of its own or the clock, branches on the "
        "rank, or takes the order of a set (a machine that is wrong every time looks the same)"
    )
