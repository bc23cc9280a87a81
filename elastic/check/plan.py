"""Which runs prove a recipe: each one breaks something else, and all must agree step by step.

A calm run by one worker says how many steps there are to compare. Every other run trains the same
steps. It does not promise that a fault of the recipe shows within these steps: a variable that
matters only after an epoch needs a check that is longer than one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic.errors import EXIT_INTERRUPTED

LEAST_STEPS = 6
FEWEST_STEPS = 3  # one before and after each end
CALM_SECONDS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One command. leave_at: the step after which its node is told to leave.

    proof: what a first difference in its steps disproves. resumes: it goes on in the run directory
    of the launch before it. code: the exit code that it must end with.
    """

    proof: str
    workers: int
    options: tuple[str, ...] = ()
    leave_at: int | None = None
    resumes: bool = False
    code: int = 0


CALM = "calm"
AGAIN = "the same once more"
MORE_WORKERS = "more workers, and a drain"
CHECKPOINT = "from a checkpoint alone"
KILLED = "a killed worker"

# What a difference shows, and what usually makes it.
_RESTART = (
    "a restart does not restore all that the loop depends on: a plain variable of the loop (keep numbers in elastic.Values), an object "
    "that State lacks, a plain attribute, a name for an object inside another one, a dataset that remembers, what is set only where an "
    "epoch begins, or a file that the recipe reads back"
)
USUAL_CAUSE = {
    AGAIN: "something does not come from the run's seed: a generator of the recipe's own, the clock, a model that is built before elastic.start, "
    "the order of a set, or a file that the recipe writes and reads back",
    MORE_WORKERS: "the result depends on which worker computes which shard: run.rank or run.world_size in what is trained, a forward or a dataset "
    "that remembers earlier calls, a number kept from the last shard (return it through step.sum), or a validation without run.evaluate",
    CHECKPOINT: _RESTART,
    KILLED: _RESTART,
}


def launches(steps: int, shards: int, ends: Collection[int] = ()) -> list[Launch]:
    """In their order.

    steps: how many each of them trains in the end, FEWEST_STEPS or more. shards: no run can have
    more workers. ends: the steps among them after which another epoch begins.
    """
    two, three = min(2, shards), min(3, shards)
    kills = "; ".join(f"step {step} rank {two - 1} backward: kill" for step in _kills(steps, ends))
    leave = _nearest(range(1, steps - 1), steps // 2, ends)
    return [
        Launch(proof=AGAIN, workers=1),
        Launch(proof=MORE_WORKERS, workers=three, leave_at=leave, code=EXIT_INTERRUPTED),
        Launch(proof=CHECKPOINT, workers=1, resumes=True),
        Launch(proof=KILLED, workers=two, options=("--snapshot-every", "1", "--faults", kills)),
    ]


def _kills(steps: int, ends: Collection[int]) -> list[int]:
    """Steps in which a worker is killed, so that training goes on after the step before.

    Once within an epoch, and once where one begins: what a recipe sets at the beginning of an epoch
    is lost by the one, and what it does at its end by the other.
    """
    restored, late = range(1, steps), max(2, (3 * steps) // 4)
    within = _nearest(restored, late - 1, ends)
    between = [step for step in restored if step in ends]
    found = {within, *([_nearest(between, late - 1, ())] if between else [])}
    return sorted(step + 1 for step in found)


def _nearest(steps: Sequence[int], wanted: int, ends: Collection[int]) -> int:
    """The one next to `wanted` that is within an epoch, and not the first, if there is one."""
    first = min(ends, default=0)
    return min(steps, key=lambda step: (step in ends, step <= first, abs(step - wanted)), default=1)
