"""What a user reads where two computations of one step differ: what, why, and what to do.

What an audit finds is the recipe's or a machine's, and a third computation tells them apart.

Each audited shard has an owner, whose gradient joins the sum, and an auditor, a rank that computes
the shard again. If the two differ, each computes it once more. A machine errs once: then three of
the four computations agree, and the rank of the fourth is named. A recipe that remembers something
between two calls, or that depends on the rank, goes on doing so, and no three agree.

It cannot tell a recipe from a machine that errs at every computation alike: that one looks like
code that depends on the rank, and the sentence says so. What a recipe does only at its first call
looks like a machine's error until it comes again: then the sentence says that it may be either.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.data.random_keys import key
from elastic.events import AuditFailed
from elastic.proof.evidence import ComputedStep, Evidence, differences, not_restored, roots

MOST_NAMES = 3


class Verdict(enum.Enum):
    ALIKE = "alike"
    UNCLEAR = "unclear"  # a third computation tells more
    ONCE = "once"  # one of three was wrong: a machine, or an algorithm that is not deterministic
    HIDDEN = "hidden"  # the first process had something that new ones lack
    RANDOM = "random"  # no two are alike


def judge(found: Sequence[Evidence]) -> Verdict:
    """Of two or three computations of a step by new workers each time, the newest last."""
    first, *later = found
    if later[-1] == first:
        return Verdict.ALIKE if len(later) == 1 else Verdict.ONCE
    if len(later) == 1:
        return Verdict.UNCLEAR
    return Verdict.HIDDEN if later[0] == later[1] else Verdict.RANDOM


def alike(step: int, seconds: float, not_restored: Sequence[str], is_rehearsal: bool) -> str:
    what = f"rehearsed step {step}" if is_rehearsal else f"the new group did step {step} again"
    names = ", ".join(not_restored[:MOST_NAMES]) + (" and more" if len(not_restored) > MOST_NAMES else "")
    kept = f"; a restart does not bring back {names}: what later steps read of it belongs in elastic.State, numbers in elastic.Values (report --json says more)"
    return f"{what}: same bits, {seconds:.1f} s{kept if names else ''}"


def accepted(step: int, names: Sequence[str], excuse: str) -> str:
    return f"step {step} was done again and differs in {named(names)}; the run goes on with what it computed now, since {excuse}"


def once_more(step: int, names: Sequence[str]) -> str:
    return f"step {step} was done again and differs in {named(names)}; it is done a third time"


def wrong_once(step: int, names: Sequence[str]) -> str:
    return (
        f"step {step} was done three times, and once {named(names)} differed: a machine computed wrongly, "
        "or an algorithm is not deterministic. The run goes on with what came out twice"
    )


def differs(first: ComputedStep, last: ComputedStep, names: Sequence[str], judged: Verdict) -> str:
    """The words for it, at most six lines."""
    step = first.step
    why = (
        "Workers that were started anew agree with each other and not with those before: the script keeps "
        "something outside its State, or reads what has changed since (or the machine computed wrongly the first time)"
        if judged is Verdict.HIDDEN
        else "No two of three computations are alike: the script draws without a seed, reads the clock, or allows "
        "algorithms that are not deterministic"
    )
    variables = [name for name in roots(not_restored(first, last)) if not name.startswith("the log's ")]
    kept = f"\nA restart does not bring back {', '.join(variables[:MOST_NAMES])}." if variables else ""
    shards = [name for name in names if name.startswith("the loss of shard")]
    if judged is Verdict.HIDDEN and first.world_size != last.world_size:
        why += f" (the number of workers too: {first.world_size} then, {last.world_size} now; a node that joined may have other files)"
    return (
        f"step {step} was done again from the state of step {step - 1} and differs: first {named(names)}.\n"
        f"{why}.{kept}"
        + (f"\n{len(shards)} shards differ." if shards else "")
        + "\nGive what it keeps to elastic.State (elastic.Values for numbers), or make it from step.number."
        "\nMend the script and give the same command (where its State has other "
        "entries then, begin from this run: --from RUN:ENTRIES --run-dir NEW); or --accept goes on with what a restart computes"
    )


def is_unmended(step: int) -> str:
    return (
        f"expected a script that was mended since step {step} was done again and differed, found the same text and arguments; "
        "mend it (after a mend of another file, change a comment in it), or give --accept"
    )


def ends_now(step: int) -> str:
    return (
        f"step {step} was done again and the loop is left in it, which it was not the first time: what ends the loop is kept outside the State. "
        "Give it to elastic.Values, or make it from step.number and from losses"
    )


def named(names: Sequence[str]) -> str:
    more = len(names) - 1
    return (names[0] if names else "nothing") + (f" and {more} more" if more > 0 else "")


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
        """The wrong node; None where the recipe was wrong."""
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

    @property
    def event(self) -> AuditFailed:
        ranks, entry = [self.owner, self.auditor], self.different[0]
        whose = "recipe" if self.node is None else "machine"
        return AuditFailed(
            step=self.step, shard=self.shard, ranks=ranks, entry=entry, verdict=whose, culprit=self.node
        )

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
                "The dataset or collate gave something else for the same samples: draw only from the global generators there, and keep nothing between calls; "
                "if the loop changes the dataset, use workers=0"
            )
        if self._alone is not None:
            return (
                "Three of four computations agree, but it came before: the function does something else at its first "
                "calls in a process (a counter, a cache: do it before the loop), or a machine is often wrong"
            )
        if self.first == self.owners_second and self.again == self.auditors_second:
            return (
                "Each rank repeats its own result, so the ranks differ: by an initialisation from a rank's first data "
                "(do it before the loop, on fixed samples), by run.rank, or as machines"
            )
        if first.startswith(GRADIENT):
            return (
                "The outputs are the same, so something in the backward, such as a hook, remembers earlier calls: "
                "use only the gradient and step.number there, or change .grad in the loop's body"
            )
        return (
            "The function remembers earlier calls: a counter (use step.number), a queue or momentum update "
            "(do it after the optimizer), an initialisation by the first data (do it before the loop)"
        )


def audited_shard(seed: int, step: int, own_shards: range) -> int:
    """The one of a rank's shards that is computed again in this step."""
    return own_shards[key(seed, "audit", step, own_shards.start) % len(own_shards)]


def auditor_of(owner: int, ranks: int) -> int:
    """The rank that computes a shard of `owner` again; itself where it is alone."""
    return (owner - 1) % ranks
