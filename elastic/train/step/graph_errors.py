"""Two errors of torch's autograd mean something else in a step than torch's words say.

Each shard has a graph of its own, and its backward comes once its function has returned. So a graph
that two shards share is used twice, and what a script changes in place between two backwards of its
own is changed before the one backward here.
"""

from types import TracebackType

from elastic.data.own_files import is_own_file

_SHARED = "backward through the graph a second time"
_CHANGED = "modified by an inplace operation"


def explained(error: Exception, call: str) -> str:
    """A sentence for an error that came out of a backward of `call`; empty for any other.

    One that a backward in the recipe's own code has raised keeps torch's words.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or _is_of_recipe(error.__traceback__):
        return ""
    if _SHARED in text:
        return (
            f"{call}: the graph of one shard was already used by another backward. Each shard has a backward of its own, and so has each function of a "
            "step: what was computed with a gradient in the loop's body, at an earlier call or in another function has no graph left. Compute it inside the function that"
            " needs it, from its own batch; where only its value is needed, use .detach()"
        )
    if _CHANGED in text:
        return (
            f"{call}: a tensor that the backward needs was changed in place after it was used ({text.partition('. Hint')[0]}). The one backward comes when the "
            "function has returned: make a new tensor inside it instead of writing into one (torch.full_like(label, 0) for label.fill_(0)), and compute "
            "again, inside the function that needs it, what another function of the step has computed before an optimizer changed the weights"
        )
    return ""


def _is_of_recipe(trace: TracebackType | None) -> bool:
    """Whether a function of the recipe lies between the call and the error."""
    while trace is not None:
        if is_own_file(trace.tb_frame.f_code.co_filename):
            return True
        trace = trace.tb_next
    return False
