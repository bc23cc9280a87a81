"""A call that the signature does not allow is the recipe's mistake, and no restart mends it.

Python raises a TypeError for it, which names neither what the argument is called here nor that the
run is over. A TypeError from inside a call goes its way: it may be of the recipe's own function.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from elastic.errors import ElasticError, UsageError

P = ParamSpec("P")
R = TypeVar("R")


def public(name: str, *, is_of_all_ranks: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a function that recipes call by this name: UsageError where its arguments do not fit.

    An error of this library is shown to the object's `_note_error`, if it has one, because the
    recipe may catch it. is_of_all_ranks: all ranks make the call together, so that any other error
    ends the run as well; perhaps a single rank's shard raised it.
    """

    def of(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not _is_of_the_call(error):
                    _note(args, name, error, is_of_all_ranks=is_of_all_ranks)
                    raise
                wrong = str(error)
            raise _refusal(name, signature, wrong)

        return call

    return of


def _is_of_the_call(error: Exception) -> bool:
    """Whether Python made no frame for the function: the arguments did not fit."""
    trace = error.__traceback__
    return isinstance(error, TypeError) and trace is not None and trace.tb_next is None


def _note(args: tuple[Any, ...], name: str, error: Exception, *, is_of_all_ranks: bool) -> None:
    note = getattr(args[0], "_note_error", None) if args else None  # is no part of what recipes see
    if note is not None and (is_of_all_ranks or isinstance(error, ElasticError)):
        half_done = UsageError(
            f"{name} was left half done by an error that the recipe caught ({type(error).__name__}: {error}), which other workers may not have "
            "met; replace a bad sample in the dataset, and decide by the loss that step.mean_loss returns"
        )
        note(error if isinstance(error, ElasticError) else half_done, is_of_all_ranks=is_of_all_ranks)


def _refusal(name: str, signature: inspect.Signature, wrong: str) -> UsageError:
    """wrong: Python's own words."""
    known = [each for each in signature.parameters.values() if each.name != "self"]
    shown = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in known])
    return UsageError(f"expected {name}{shown}, found a call that {wrong.partition('() ')[2] or wrong}")
