"""Which runs prove a recipe: each one breaks something else, and all must agree step by step.

A calm run by one worker says how many steps there are to compare. Every other run trains the same
steps. It does not promise that a fault of the recipe shows within these steps: a variable that
matters only after an epoch needs a check that is longer than one.
"""

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


def launches(steps: int, shards: int) -> list[list[Launch]]:
    """Chains of launches; those of one chain share a run directory, in their order.

    steps: how many each of them trains in the end. shards: no run can have more workers.
    """
    two, three = min(2, shards), min(3, shards)
    half, late = max(1, steps // 2), max(2, (3 * steps) // 4)
    # A kill needs a step before it, and the proof of the drain one before and after each end.
    kill = f"step {late} rank {two - 1} backward: kill"
    chains = [[Launch(proof=AGAIN, workers=1)]]
    chains += [[Launch(proof=MORE_WORKERS, workers=w)] for w in sorted({two, three} - {1})]
    if steps > 1:
        chains.append(
            [Launch(proof=KILLED, workers=two, options=("--snapshot-every", "1", "--faults", kill))]
        )
    if half < late < steps:
        whole_node = f"step {late} node 0: kill"
        chains.append(
            [
                Launch(proof=DRAINED, workers=two, leave_at=half, ends=(75,)),
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


def left_out(steps: int, shards: int) -> dict[str, str]:
    """Which proofs `launches` cannot hold, each with the reason, as the end of a sentence."""
    held = {each.proof for chain in launches(steps, shards) for each in chain}
    why = {
        MORE_WORKERS: "the run has one shard, and so one worker at most",
        KILLED: f"it takes 2 steps, and there is {steps}",
        DRAINED: f"it takes 3 steps, and there are {steps}",
        CHECKPOINT: f"it takes 3 steps, and there are {steps}",
    }
    return {proof: reason for proof, reason in why.items() if proof not in held}
