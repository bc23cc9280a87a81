"""What a user reads where a recipe uses what a call, or an earlier step, has left behind.

It says what was found, why the run could not be exact, and what to write instead.
"""

from elastic.train.marked_tensor import Mark

FUNCTION = "the function given to step.mean_loss or step.sum"
BODY = "the loop's body"
_NAMED = 3


def of_other_call(names: list[str]) -> str:
    return (
        f"{FUNCTION} reads what the function of an earlier call has left behind, in {_shown(names)}. That is of the last shard that this worker "
        "computed there, for each shard here: all shards of a call come before the next call. Compute it inside the function that needs it, from its own "
        "batch; or return both numbers from one function; what a sum over the batch tells comes from step.sum"
    )


def of_own_call(names: list[str]) -> str:
    return (
        f"{FUNCTION} reads what its own call for the shard before has left behind, in {_shown(names)}, and returns something else with it. Each worker calls it "
        "for its own shards, one after another, and its first one finds what the loop has left there, so that the result depends on the number of workers. Put it back "
        "before the function returns; or let the function set it before it is read, or the loop's body alone, before the call"
    )


def of_earlier_step(its: Mark, reader: str, does: str) -> str:
    return (
        f"{reader} reads {its.name}, which the loop's body left there in step {its.step}, and {does}. No object of the State "
        "saves it: a process that restarts in between has none, or another one, so that the result depends on restarts. Compute it in the step that reads it, "
        "before it is read; or keep it in elastic.Values(name=...), which goes into the State, in the step that computes it, and read it there"
    )


def of_body(name: str, does: str) -> str:
    return (
        f"the loop's body reads {name}, which {FUNCTION} has left behind, and {does}. That is of the last shard that this worker computed, so that the result "
        "depends on the number of workers. What the loop needs of all shards: return it from a function, total = step.sum(lambda batch: ...), which is the "
        "same on every worker; a mean over samples is such a sum divided by step.global_batch. What one shard needs of itself: compute it inside the function "
        "that needs it, from its own batch. A part of the loss: add it to the loss that the function returns"
    )


def of_earlier_numbers(names: list[str]) -> str:
    return (
        f"note: the loop reads {_shown(names)}, which the loop's body left there in an earlier step, and no object of the State saves it: a "
        "process that restarts in between has none, or another one. Where the result depends on it, compute it in the step that reads it, or keep it in "
        "elastic.Values; what is only shown may stay"
    )


def of_numbers(names: list[str]) -> str:
    return (
        f"note: the loop reads {_shown(names)}, which {FUNCTION} has left behind: it is of the last shard that this worker computed, and another one at another number "
        "of workers. What a forward in the loop's body put there for a later step is lost where a process restarts in between: no state has it. Where the "
        "result or a metric depends on it, return it from a function, step.sum(lambda batch: ...), which is the same on every worker, and keep what a later "
        "step needs in elastic.Values; what is only shown may stay"
    )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
