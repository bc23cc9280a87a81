"""What takes the steps of a run is a `for` of Python code or `next(...)`, and no compiled function.

`reduce(f, run.steps(...))` keeps its accumulator in compiled code, `islice(run.steps(...), 16)` its
count, `zip` its place in the other iterable: no state has them, and no look can see them. The text
of the instruction that asks tells the one kind. Objects that iterate over the steps, whoever made
them, are found through the garbage collector: they refer to the iterator that run.steps returned.
What hands steps on one by one, as enumerate and generators do (tqdm), is let through.
"""

import ast
import gc
from collections.abc import Iterator
from typing import Any

from elastic.errors import UsageError
from elastic.train.recipe_text import called
from elastic.train.text_place import TextPlace

_REFUSED = zip, map, filter  # and all of itertools
_ASKING = "next", "__next__", "send"
_DEPTH = 6


def check(place: TextPlace, iterator: Iterator[Any] | None, own: TextPlace) -> None:
    """place: of the code that asks for the next step. iterator: over the steps. own: where the
    recipe's own code is, whose call may be a library's (`executor.map(f, steps)` makes a zip).

    Raises UsageError.
    """
    if name := _compiled(place) or holder(iterator):
        if own.code is not place.code and own.path and isinstance(own.path[-1], ast.Call):
            name = f"{ast.unparse(own.path[-1].func)}(...)"
        raise UsageError(
            f"the steps of the run are given to {name}, which keeps between two steps what no process that restarts has, such as a count:"
            " it would begin again at the step where the run goes on. Write the loop as `for step in run.steps(data, state):`. run.data(dataset, steps=...) says how long"
            " the run is, run.stop(reason) ends it earlier; step.number, step.epoch and step.ends_epoch say where it is, and elastic.Values(...) in the State"
            " keeps what the loop changes"
        )


def _compiled(place: TextPlace) -> str:
    """The compiled function that asks; empty for a loop, a generator, and `next`."""
    if place.iterates or not place.path or place.operation in ("SEND", "YIELD_VALUE"):
        return ""
    asking = place.path[-1]
    if not isinstance(asking, ast.Call):
        return "a list, a comparison or an assignment to several names"
    name = called(asking)
    return "" if name in _ASKING else f"{name or 'a function'}(...)"


def holder(iterator: Iterator[Any] | None) -> str:
    """What takes the steps from this iterator by compiled code that counts, if anything does."""
    if iterator is None:  # all objects refer to that
        return ""
    level, seen = [iterator], set[int]()
    for _ in range(_DEPTH):
        if not level:
            break
        above = gc.get_referrers(*level)
        for each in above:
            if isinstance(each, _REFUSED) or type(each).__module__ == "itertools":
                return f"{type(each).__name__.strip('_')}(...)"
        level = [each for each in above if _hands_on(each) and id(each) not in seen]
        seen |= {id(each) for each in level}
    return ""


def _hands_on(thing: Any) -> bool:
    """Whether it may be an iterator, or what one consists of."""
    return isinstance(thing, (tuple, dict)) or hasattr(type(thing), "__next__")
