"""What an audit finds is the recipe's or a machine's, and a third computation tells them apart.

Each audited shard has an owner, whose gradient joins the sum, and an auditor, a rank that computes
the shard again. If the two differ, each computes it once more. A machine errs once: then three of
the four computations agree, and the rank of the fourth is named. A recipe that remembers something
between two calls, or that depends on the rank, goes on doing so, and no three agree.

It cannot tell a recipe from a machine that errs at every computation alike: that one looks like
code that depends on the rank, and the sentence says so. And what a recipe does only at its very
first call looks like a machine's error, until the step is done again and differs again, or until it
comes again as many steps after a beginning: then the sentence says that it may be either.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.data.random_keys import key
from elastic.proof.evidence import Evidence, differences

DATA = "the data of the shard"
GRADIENT = "the gradient of "


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A shard that its owner and an auditor, both ranks, computed twice each, with other results.

    came_before: an audit failed in this step before, and the step is done again because of it; or
    the one before failed as many steps after a beginning as this one. has_copies: the owner's first
    data come from processes with copies of the dataset, and only those.
    """

    step: int
    shard: int
    owner: int
    auditor: int
    nodes: tuple[str, str]  # theirs
    first: Evidence  # of the owner
    again: Evidence  # of the auditor
    owners_second: Evidence
    auditors_second: Evidence
    came_before: bool
    has_copies: bool

    @property
    def different(self) -> list[str]:
        return differences(self.first, self.again)

    @property
    def node(self) -> str | None:
        """The one that was wrong; None where the recipe was."""
        return None if self.came_before or self._alone is None else self.nodes[self._alone]

    @property
    def _alone(self) -> int | None:
        """Whose first computation three others do not confirm: 0 for the owner's, 1 for the
        auditor's.
        """
        if self.has_copies and DATA in self.different:
            return None
        if self.again == self.owners_second == self.auditors_second:
            return 0
        return 1 if self.first == self.owners_second == self.auditors_second else None

    def sentence(self) -> str:
        """What was expected, what was found, and what to do."""
        where, different = f"step {self.step}, shard {self.shard}", self.different
        differs = (
            f"the first that differs is {different[0]}, {len(different)} of {len(self.first.entries)} in all"
        )
        if self.node is not None:
            wrong = self.auditor if self._alone else self.owner
            return (
                f"{where}: rank {wrong} (node {self.node}) computed it once in a way that three other computations of it do not confirm: "
                f"{differs}. That was the machine; the step is done again"
            )
        ranks = "again on the same rank"
        if self.owner != self.auditor:
            ranks = f"by rank {self.owner} and again by rank {self.auditor}"
        return (
            f"{where}: computed {ranks}, from the same parameters, buffers and random streams, it must give the same bits, and does not: "
            f"{differs}. {self._cause()}"
        )

    def _cause(self) -> str:
        first = self.different[0]
        if first == DATA:
            return (
                "The data set, or collate, gave something else for the same samples: draw from the global generators of torch, Python or NumPy in __getitem__, which are keyed "
                "for each sample, and leave nothing behind there. Data-loading processes also lack what the loop changed in the dataset: use workers=0 there"
            )
        if self._alone is not None:
            return (
                "Three of four computations agree, as where a machine was wrong once; but it came before, in this step or as many steps after a beginning. So it does with "
                "a function that does something else at its first calls in a process (a counter, a cache, an initialisation: do it before the loop), or with a machine that is often wrong"
            )
        if self.first == self.owners_second and self.again == self.auditors_second:
            return (
                "Each rank repeats its own result, so the ranks differ: in what they did before (an initialisation by the first data that a rank sees: do it before the loop, "
                "on fixed samples), in the recipe's use of run.rank, or as machines"
            )
        if first.startswith(GRADIENT):
            return (
                "What the function returned is the same, so that something in the backward, such as a hook, remembers what was before. Make it depend on the gradient and "
                "on step.number alone, or change .grad after the call, in the loop's body"
            )
        return (
            "The function remembers something from call to call: a counter in a forward (write step.number into the model before the call), a queue or a momentum update "
            "(do it in the loop, after the optimizer), or an initialisation by the first data (do it before the loop, on fixed samples)"
        )


def audited_shard(seed: int, step: int, own_shards: range) -> int:
    """The one of a rank's shards that is computed again in this step."""
    return own_shards[key(seed, "audit", step, own_shards.start) % len(own_shards)]


def auditor_of(owner: int, ranks: Sequence[int]) -> int:
    """The rank that computes a shard of `owner` again; itself where it is alone.

    ranks: those that have shards, in order.
    """
    return ranks[(ranks.index(owner) - 1) % len(ranks)]


def audited_by(auditor: int, ranks: Sequence[int]) -> int:
    """The rank one of whose shards `auditor` computes again."""
    return ranks[(ranks.index(auditor) + 1) % len(ranks)]
