"""What is exact and perhaps not meant is said once, after the first step of a run.

It is the same at every world size, so nothing is refused. Whether a hook is linear, and whether a
buffer is a running average, cannot be known. A module's own backward hooks are not mentioned: most
only look.
"""

from collections.abc import Iterable

from torch import nn

from elastic.train.state import State

_NAMED = 3


def notes(
    state: State, averaged: list[str], shards: int, without_gradient: Iterable[nn.Parameter] = ()
) -> list[str]:
    """Sentences. averaged: names of the buffers that became a mean of different values.

    without_gradient: parameters that a backward reached and no optimizer updates.
    """
    found = []
    if idle := [state.name_of(p) for p in without_gradient]:
        found.append(
            f"{_listed(idle)}: no optimizer of the State updates it, so that the shards' gradients are not summed for it and .grad is None, where plain "
            "PyTorch would fill it. A norm over all parameters of the model (clip_grad_norm_) leaves it out: freeze it by requires_grad_(False), or "
            "give it to an optimizer of the State"
        )
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
