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
from enum import Enum

from elastic.data.random_keys import key
from elastic.proof.evidence import Evidence, differences

DATA = "the data of the shard"
GRADIENT = "the gradient of "


class Culprit(Enum):
    OWNER = "owner"
    AUDITOR = "auditor"
    RECIPE = "recipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """first: the first entry that differs; different: how many do, of `entries`.

    came_again: a machine would be named, had the same not come before.
    """

    culprit: Culprit
    first: str
    different: int
    entries: int
    owner_repeats: bool  # the owner's two computations agree
    auditor_repeats: bool
    came_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """Which computation was audited. Nodes by name; owner and auditor are ranks."""

    step: int
    shard: int
    owner: int
    auditor: int
    owner_node: str
    auditor_node: str

    def node_of(self, culprit: Culprit) -> str:
        return self.owner_node if culprit is Culprit.OWNER else self.auditor_node


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


def judge(
    *,
    first: Evidence,
    again: Evidence,
    owners_second: Evidence,
    auditors_second: Evidence,
    is_redo: bool,
    has_copies: bool,
) -> Judged:
    """Whose fault it is that `first`, the owner's, and `again`, the auditor's, differ.

    is_redo: an audit failed in this step before, and the step is done again because of it; or the
    one before failed as many steps after a beginning as this one.
    has_copies: the owner's data come from processes with copies of the dataset, and only those.
    """
    different = differences(first, again)
    if has_copies and DATA in different:
        culprit = Culprit.RECIPE
    elif again == owners_second == auditors_second:
        culprit = Culprit.OWNER
    elif first == owners_second == auditors_second:
        culprit = Culprit.AUDITOR
    else:
        culprit = Culprit.RECIPE
    came_again = is_redo and culprit is not Culprit.RECIPE
    return Judged(
        culprit=Culprit.RECIPE if came_again else culprit,
        first=different[0],
        different=len(different),
        entries=len(first.entries),
        owner_repeats=first == owners_second,
        auditor_repeats=again == auditors_second,
        came_again=came_again,
    )


def sentence(audited: Audited, judged: Judged) -> str:
    """What was expected, what was found, and what to do."""
    where = f"step {audited.step}, shard {audited.shard}"
    differs = f"the first that differs is {judged.first}, {judged.different} of {judged.entries} in all"
    if judged.culprit is not Culprit.RECIPE:
        wrong = audited.owner if judged.culprit is Culprit.OWNER else audited.auditor
        return (
            f"{where}: rank {wrong} (node {audited.node_of(judged.culprit)}) computed it once in a way that three other computations of it do not confirm: "
            f"{differs}. That was the machine; the step is done again"
        )
    ranks = "again on the same rank"
    if audited.owner != audited.auditor:
        ranks = f"by rank {audited.owner} and again by rank {audited.auditor}"
    return (
        f"{where}: computed {ranks}, from the same parameters, buffers and random streams, it must give the same bits, and does not: "
        f"{differs}. {_cause(judged)}"
    )


def _cause(judged: Judged) -> str:
    if judged.first == DATA:
        return (
            "The data set, or collate, gave something else for the same samples: draw from the global generators of torch, Python or NumPy in __getitem__, which are keyed "
            "for each sample, and leave nothing behind there. Data-loading processes also lack what the loop changed in the dataset: use workers=0 there"
        )
    if judged.came_again:
        return (
            "Three of four computations agree, as where a machine was wrong once; but it came before, in this step or as many steps after a beginning. So it does with "
            "a function that does something else at its first calls in a process (a counter, a cache, an initialisation: do it before the loop), or with a machine that is often wrong"
        )
    if judged.owner_repeats and judged.auditor_repeats:
        return (
            "Each rank repeats its own result, so the ranks differ: in what they did before (an initialisation by the first data that a rank sees: do it before the loop, "
            "on fixed samples), in the recipe's use of run.rank, or as machines"
        )
    if judged.first.startswith(GRADIENT):
        return (
            "What the function returned is the same, so that something in the backward, such as a hook, remembers what was before. Make it depend on the gradient and "
            "on step.number alone, or change .grad after the call, in the loop's body"
        )
    return (
        "The function remembers something from call to call: a counter in a forward (write step.number into the model before the call), a queue or a momentum update "
        "(do it in the loop, after the optimizer), or an initialisation by the first data (do it before the loop, on fixed samples)"
    )
