"""What is exact and perhaps not meant is said once, after the first step of a run.

It is the same at every world size, so nothing is refused. Whether a hook is linear, and whether a
buffer is a running average, cannot be known. A module's own backward hooks are not mentioned: most
only look.
"""

from elastic.train.state.state import State

_NAMED = 3


def notes(state: State, averaged: list[str], shards: int) -> list[str]:
    """Sentences. averaged: names of the buffers that became a mean of different values."""
    found = list[str]()
    if shards == 1:
        return found
    hooked = [state.name_of(p) for p in state.trained if p._backward_hooks]  # noqa: SLF001 - no public name
    if hooked:
        found.append(
            f"{_listed(hooked)} has a hook on its gradient (register_hook): it is called for each of the {shards} shards, and with step.mean_loss it sees "
            f"the gradient divided by {shards}. One that is not linear, such as a clip, gives another result than in plain PyTorch: change .grad after "
            "the call instead"
        )
    if averaged:
        found.append(
            f"{_listed(averaged)}: a buffer of floats that a forward changes becomes the mean over the {shards} shards of what each made of it. That is right "
            "for a running average, and not for a queue, a codebook or a counter: update those in the loop's body, from step.sum"
        )
    return found


def _listed(names: list[str]) -> str:
    others = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + others
