"""The first step and entry that differ are found from the lines that two runs wrote."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastic.check import plan
from elastic.system.trace_line import TraceLine

# What usually makes the runs of a proof differ, where those of the proofs before it agree.
CAUSES = {
    plan.GRADIENT: (
        "the gradient is not that of the whole batch, though it is the same for every number of workers. Usual causes: the loss is no "
        "mean over samples (a sum; a mean over words where shards have different numbers of them), or it couples samples (a contrastive "
        "loss sees those of one shard): build it from step.sum"
    ),
    plan.AGAIN: (
        "two equal commands differ: something does not come from the run's seed. Usual causes: a generator of the recipe's or the "
        "dataset's own, the clock, a model that is built before elastic.start, objects in the order of a set"
    ),
    plan.MORE_WORKERS: (
        "the result depends on which worker computes which shard. Usual causes: a forward or a dataset that remembers earlier calls "
        "(a counter, a queue, a momentum update, an initialisation from the first batch), run.rank or run.world_size in what is trained, run.mean"
    ),
    plan.KILLED: (
        "what a restart restores is not all that the loop depends on. Usual causes: a plain variable of the loop (a counter, the best loss, "
        "patience, the number of enumerate), an EMA copy, a schedule or a scaler that is not in State; keep numbers in elastic.Values"
    ),
}
CAUSES[plan.DRAINED] = CAUSES[plan.CHECKPOINT] = CAUSES[plan.KILLED]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """step: the first one that differs. entry: of the state, or what of the step differs."""

    step: int
    entry: str


def first_difference(
    expected: Mapping[int, TraceLine], found: Sequence[TraceLine], ignored: Collection[str] = ()
) -> FirstDifference | None:
    """The first line of `found`, in the order of the steps, that is not as expected.

    A step that was trained twice, because a fault cost it, has two lines. ignored: names of logged
    values that are not compared.
    """
    for line in sorted(found, key=lambda line: line.step):
        # A later generation may train beyond the steps that are compared, never the calm run.
        if line.step in expected and (entry := _entry_that_differs(expected[line.step], line, ignored)):
            return FirstDifference(step=line.step, entry=entry)
    return None


def _entry_that_differs(expected: TraceLine, found: TraceLine, ignored: Collection[str]) -> str | None:
    for name in sorted(expected.entries.keys() | found.entries.keys()):
        if expected.entries.get(name) != found.entries.get(name):
            return name
    if expected.loss != found.loss:
        return "the loss"
    if expected.chain != found.chain:
        return "the gradients"
    names = sorted(expected.logged.keys() | found.logged.keys() - set(ignored))
    differing = (name for name in names if expected.logged.get(name) != found.logged.get(name))
    return next((f"step.log({name}=...)" for name in differing if name not in ignored), None)


def unsteady_values(expected: Mapping[int, TraceLine], again: Sequence[TraceLine]) -> frozenset[str]:
    """Names of logged values that two equal commands logged differently, as seconds are."""
    return frozenset(
        name
        for line in again
        if line.step in expected
        for name in line.logged.keys() | expected[line.step].logged.keys()
        if line.logged.get(name) != expected[line.step].logged.get(name)
    )
