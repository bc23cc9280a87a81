"""Which runs prove a recipe: each one breaks something else, and all must agree step by step.

A calm run by one worker says how many steps there are to compare. Every other run trains the same
steps. It does not promise that a fault of the recipe shows within these steps: a variable that
matters only after an epoch needs a check that is longer than one.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LEAST_STEPS = 6
CALM_SECONDS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One command. leave_at: the step after which its node is told to leave.

    proof: what a first difference in its steps disproves. resumes: it goes on in the run directory
    of the launch before it. ends: the exit codes that it must end with.
    """

    proof: str
    workers: int
    options: tuple[str, ...] = ()
    leave_at: int | None = None
    resumes: bool = False
    ends: tuple[int, ...] = (0,)
    gradient: bool = False


CALM = "calm"
GRADIENT = "the first gradient"
# How far it may lie from that of the whole batch, as a share of its norm: bfloat16 has 8 bits.
GRADIENT_LIMIT = 0.01
AGAIN = "the same once more"
MORE_WORKERS = "more workers"
KILLED = "a killed worker"
DRAINED = "drained, and resumed by others"
CHECKPOINT = "from a checkpoint alone"
KILLED_NODE = (-9, 137)
KILL_STEPS = 2  # a step before the kill
DRAIN_STEPS = 3  # one before and after each end
MOST_WORKERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A launch that the recipe does not allow. is_gap: so that a proof is missing, which a user of
    the recipe would need; false where the recipe can never meet what it would show.
    """

    launch: Launch
    reason: str
    is_gap: bool


def launches(steps: int, shards: int, ends: Collection[int] = ()) -> list[list[Launch]]:
    """Chains of launches; those of one chain share a run directory, in their order.

    steps: how many each of them trains in the end. shards: no run can have more workers. ends: the
    steps among them after which another epoch begins.
    """
    two, three = min(2, shards), min(3, shards)
    chains = [[Launch(proof=AGAIN, workers=1)]]
    chains += [[Launch(proof=MORE_WORKERS, workers=w)] for w in sorted({two, three} - {1})]
    if steps >= KILL_STEPS:
        kills = (f"step {step} rank {two - 1} backward: kill" for step in _kills(steps, ends))
        faults = ("--snapshot-every", "1", "--faults", "; ".join(kills))
        chains.append([Launch(proof=KILLED, workers=two, options=faults)])
    if steps >= DRAIN_STEPS:
        leave = _nearest(range(1, steps - 1), steps // 2, ends)
        whole_node = f"step {max(leave + 1, _late(steps))} node 0: kill"
        chains.append(
            [
                Launch(proof=DRAINED, workers=two, leave_at=leave, ends=(75,)),
                Launch(
                    proof=DRAINED,
                    workers=three,
                    resumes=True,
                    options=("--faults", whole_node),
                    ends=KILLED_NODE,
                ),
                Launch(proof=CHECKPOINT, workers=1, resumes=True),
            ]
        )
    return chains


def left_out(steps: int, shards: int) -> list[LeftOut]:
    """The launches that `launches` cannot hold, each with the reason, as the end of a sentence."""
    found = []
    if shards < MOST_WORKERS:
        reason = f"the run has {shards} shard{'s' * (shards > 1)}, and so {shards} worker{'s' * (shards > 1)} at most"
        launch = Launch(proof=MORE_WORKERS, workers=shards + 1)
        found.append(LeftOut(launch=launch, reason=reason, is_gap=False))
    for proof, least in ((KILLED, KILL_STEPS), (DRAINED, DRAIN_STEPS), (CHECKPOINT, DRAIN_STEPS)):
        if steps < least:
            reason = f"it takes {least} steps, and there {'is' if steps == 1 else 'are'} {steps}"
            found.append(LeftOut(launch=Launch(proof=proof, workers=1), reason=reason, is_gap=True))
    return found


def _kills(steps: int, ends: Collection[int]) -> list[int]:
    """Steps in which a worker is killed, so that training goes on after the step before.

    Once within an epoch, and once where one begins: what a recipe sets at the beginning of an epoch
    is lost by the one, and what it does at its end by the other.
    """
    restored = range(1, steps)
    within = _nearest(restored, _late(steps) - 1, ends)
    between = [step for step in restored if step in ends]
    found = {within, *([_nearest(between, _late(steps) - 1, ())] if between else [])}
    return sorted(step + 1 for step in found)


def _nearest(steps: Sequence[int], wanted: int, ends: Collection[int]) -> int:
    """The one next to `wanted` that is within an epoch, and not the first, if there is one."""
    first = min(ends, default=0)
    return min(steps, key=lambda step: (step in ends, step <= first, abs(step - wanted)))


def _late(steps: int) -> int:
    return max(2, (3 * steps) // 4)
