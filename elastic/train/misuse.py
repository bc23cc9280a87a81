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

_IN_THE_PLACE_OF = {
    "collate_fn": "write collate=function of a list of samples",
    "num_workers": "write workers=",
    "batch_size": "the samples of one step, over all workers, are elastic.start(global_batch=...)",
    "shuffle": "leave it out: the run shuffles by its seed, each epoch in another order, and order=function(epoch) gives another order",
    "sampler": "write weights=, one number for each sample, or order=function(epoch), which returns sample numbers",
    "batch_sampler": "write order=function(epoch), which returns sample numbers",
    "drop_last": "write tail='drop' or tail='pad'",
    "generator": "leave it out: random numbers come from the run's seed",
    "worker_init_fn": "leave it out: each sample has random numbers of its own, in whichever process it is loaded",
    "pin_memory": "leave it out",
    "persistent_workers": "leave it out: loading processes stay for the whole loop",
    "prefetch_factor": "leave it out",
    "retain_graph": "leave it out: step.sum keeps the graphs until step.backward",
}
_OF_CALL = {
    ("elastic.start", "batch_size"): "write global_batch=, the samples of one step over all workers",
    ("elastic.start", "epochs"): "write run.data(dataset, epochs=...)",
    ("elastic.start", "steps"): "write run.data(dataset, steps=...)",
    (
        "elastic.start",
        "run_dir",
    ): "give the command --run-dir, or without elastic-train the variable ELASTIC_RUN_DIR",
    ("run.evaluate", "shuffle"): "leave it out: each sample counts once",
    ("run.evaluate", "drop_last"): "leave it out: each sample counts once",
    ("run.steps", "epochs"): "write run.data(dataset, epochs=...)",
    ("run.steps", "steps"): "write run.data(dataset, steps=...)",
}


def public(name: str, *, is_of_all_ranks: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a function that recipes call by this name: UsageError where its arguments do not fit.

    An error of this library is shown to the object's `_note_error`, if it has one, because the
    recipe may catch it. is_of_all_ranks: all ranks make the call together, so that any other error
    ends the run as well; one rank's shard may be the only one that raised it.
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
            raise UsageError(_explain(name, signature, args, kwargs, wrong))

        return call

    return of


def _is_of_the_call(error: Exception) -> bool:
    """Whether Python made no frame for the function: the arguments did not fit."""
    trace = error.__traceback__
    return isinstance(error, TypeError) and trace is not None and trace.tb_next is None


def _note(args: tuple[Any, ...], name: str, error: Exception, *, is_of_all_ranks: bool) -> None:
    note = getattr(args[0], "_note_error", None) if args else None  # is no part of what recipes see
    if note is not None and (is_of_all_ranks or isinstance(error, ElasticError)):
        noted = error if isinstance(error, ElasticError) else _half_done(name, error)
        note(noted, is_of_all_ranks=is_of_all_ranks)


def _half_done(name: str, error: Exception) -> UsageError:
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return UsageError(
        f"{name} was left half done by an error that the recipe caught ({words}). Each worker computes shards of its own, so the "
        "others may not have met it, and would go on otherwise. Replace a bad sample in the dataset or its collate, return a loss of zero "
        "for a bad shard, and decide about an update by the loss that step.mean_loss returns, which is the same on every worker"
    )


def _explain(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], wrong: str
) -> str:
    """wrong: Python's own words, for what is not explained here."""
    known = [each for each in signature.parameters.values() if each.name != "self"]
    given = len(args) - ("self" in signature.parameters)
    unknown = [each for each in kwargs if each not in signature.parameters]
    by_place = [each.name for each in known if each.kind is each.POSITIONAL_OR_KEYWORD]
    filled = {*by_place[:given], *kwargs}
    missing = [
        each.name
        for each in known
        if each.default is each.empty and each.name not in filled and each.kind is not each.VAR_KEYWORD
    ]
    found = [f"{each}=: {_instead(name, each)}" for each in unknown]
    if given > len(by_place):
        words = f"{given} argument{'s' if given > 1 else ''}"
        found.append(f"{words} without a name, of which it takes {len(by_place) or 'none'}: name them")
    if missing and not found:
        found = [f"no {' and no '.join(missing)}"]
    return f"expected {name}{_shown(known)}, found {'; '.join(found) or wrong}"


def _instead(name: str, argument: str) -> str:
    return _OF_CALL.get((name, argument)) or _IN_THE_PLACE_OF.get(argument, "it has no such argument")


def _shown(parameters: list[inspect.Parameter]) -> str:
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(plain))
