"""An error that came back after a restart ends the run, unless another state may still avoid it.

The same exception at the same place in two generations in a row would come in the third one too.
This keeps `--max-restarts` for failures that a restart may mend; worker/own_error.py says which
exceptions can be such an error at all.
"""

from collections.abc import Iterable

from elastic.system.raised_error import RESTORES_OF_ONE_STATE, RaisedError

# The recipe's text is wrong, whatever the numbers in the state are.
_OF_THE_TEXT = frozenset(
    {"AttributeError", "ModuleNotFoundError", "NameError", "TypeError", "UnboundLocalError"}
)


def came_back(now: RaisedError | None, before: Iterable[RaisedError], max_restarts: int) -> str | None:
    """Why no restart helps, as a sentence; None if one may.

    now: of the worker that failed first. before: of the workers of the generation before.
    """
    if now is None:
        return None
    same = [each for each in before if _identity(each) == _identity(now)]
    if not same or _may_be_the_state(now, same[0], max_restarts):
        return None
    place = now.place
    begin = {None: "", 0: " from the beginning"}.get(place.resumed, f" from step {place.resumed}")
    return f"the same error came back {place.where} after a restart{begin}, so that another restart would not help"


def _may_be_the_state(now: RaisedError, before: RaisedError, max_restarts: int) -> bool:
    """Whether the state that was restored may be the cause, and an older one will be tried.

    A state may be damaged in a way that no checksum shows: a number that a machine computed wrongly
    and that was saved as it was. The newest state then brings the same error each time, and after
    RESTORES_OF_ONE_STATE restores it gives way to an older one. Ending the run before would take
    that chance away. There is no such chance where no older state exists, or where --max-restarts
    ends the run before one is tried. And once the error has come back from an older state than
    before, both states would have to be damaged.
    """
    began, began_before = now.place.resumed, before.place.resumed
    if now.kind in _OF_THE_TEXT or began is None or not now.place.has_older:
        return False
    is_from_older = began_before is not None and began < began_before
    return max_restarts > RESTORES_OF_ONE_STATE and not is_from_older


def _identity(error: RaisedError) -> tuple[str, ...]:
    # The place names the step in work: where it is the same, no new step lies between.
    return error.kind, error.message, error.line, error.place.where
