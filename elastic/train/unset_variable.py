"""A variable that only the loop sets has no value where the loop had no step left to do.

A process that is killed after the last step is followed by one that finds the training complete,
and goes on after the loop. So does a complete run that is started again without an agent.
"""

import traceback
from collections.abc import Iterator
from itertools import chain
from types import CodeType

from elastic.errors import UsageError
from elastic.train.accesses import VARIABLES, Action, accesses


def explain_unset(error: BaseException, last_step: int) -> UsageError | None:
    """What is behind a NameError of the code after the loop; None where nothing ever sets the name.

    The loop of this process did no step. last_step: of the run.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = next((word for word in str(error).split("'")[1:2]), "")
    if not isinstance(error, NameError) or not any(name in _set_by(frame.f_code) for frame in frames):
        return None
    explained = UsageError(
        f"{name!r} has no value after the loop, which sets it: all {last_step} steps are done and saved, so this process, which resumed "
        f"after the last one, did none. Compute it after the loop, or keep it in elastic.Values({name}=...), which goes into the State"
    )
    return explained.with_traceback(error.__traceback__)


def _set_by(code: CodeType) -> Iterator[str]:
    """The names of the variables that a function, or the top of a script, assigns."""
    for each in chain.from_iterable(accesses(code)):
        if each.action is Action.WRITE and each.place in VARIABLES:
            yield each.name
