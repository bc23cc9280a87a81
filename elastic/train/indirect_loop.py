"""What takes the steps of a run is a `for` of Python code or `next(...)`, and no compiled function.

`reduce(f, run.steps(...))` keeps its accumulator in compiled code, `islice(run.steps(...), 16)` its
count, `zip` its place in the other iterable: no state has them, and no look can see them. A call
such as `reduce` is recognised by the text of the instruction that asks. Objects that iterate over
the steps are found through the garbage collector: they refer to the iterator of run.steps.
What hands steps on one by one, as enumerate and generators do (tqdm), is let through.
"""

import ast
import gc
from functools import partial
from itertools import pairwise
from types import BuiltinFunctionType, FrameType, MethodWrapperType
from typing import Any

from elastic.data.own_files import is_own_file
from elastic.errors import UsageError
from elastic.train.recipe_text import called
from elastic.train.steps_origin import StepsOrigin, generators_of, is_generator
from elastic.train.text_place import place_of

_REFUSED = zip, map, filter  # and all of itertools
_ASKING = "next", "__next__", "send"
_REPEATING = "list", "tuple", "set", "dict", "sum", "max", "min", "any", "all", "sorted", "reduce", "deque"
_DEPTH = 6


def check(asking: list[FrameType], origin: StepsOrigin, *, is_direct: bool) -> None:
    """asking: the frames that ask for the first step. origin: of the steps.

    is_direct: the innermost one is `for step in run.steps(...)`. Raises UsageError.
    """
    name = "" if is_direct else _compiled(asking[0])
    sources = [*generators_of(asking), *([] if is_direct else [origin.iterator])]
    if name := name or _asks_generator(asking, origin) or holder(sources):
        # A call of the recipe's may be a library's: `executor.map(f, steps)` makes a zip.
        own = next((each for each in asking if is_own_file(each.f_code.co_filename)), asking[0])
        call = place_of(own).path[-1:] if own is not asking[0] else ()
        name = next((f"{ast.unparse(each.func)}(...)" for each in call if isinstance(each, ast.Call)), name)
        raise UsageError(
            f"the steps of the run are given to {name}, which keeps between two steps what no process that restarts has, such as a count:"
            " it would begin again at the step where the run goes on. Write the loop as `for step in run.steps(data, state):`. run.data(dataset, steps=...) says how long"
            " the run is, run.stop(reason) ends it earlier; step.number, step.epoch and step.ends_epoch say where it is, and elastic.Values(...) in the State"
            " keeps what the loop changes"
        )


def calls(frame: FrameType, below: FrameType) -> bool:
    """Whether `list(map(function, ...))`, or a `for` over a map, calls the function again."""
    is_call = not is_generator(below) and below.f_code.co_name != "__next__"
    return is_call and (place_of(frame).iterates or _compiled(frame).removesuffix("(...)") in _REPEATING)


def _asks_generator(asking: list[FrameType], origin: StepsOrigin) -> str:
    """The compiled function that takes the items of a generator which hands on the steps."""
    for number, (below, above) in enumerate(pairwise(asking), 1):
        hands_on = is_generator(below) or below.f_code.co_name == "__next__"
        if hands_on and (name := _compiled(above)) and not origin.is_of_each_call(asking[:number]):
            return name
    return ""


def _compiled(asking: FrameType) -> str:
    """The compiled function that asks; empty for a loop, a generator, and `next`."""
    place = place_of(asking)
    if place.iterates or not place.path or place.operation in ("SEND", "YIELD_VALUE"):
        return ""
    call = place.path[-1]
    if not isinstance(call, ast.Call):
        return "a list, a comparison or an assignment to several names"
    name = called(call)
    return "" if name in _ASKING or _is_next(_value_of(call.func, asking)) else f"{name or 'a function'}(...)"


def _value_of(function: ast.expr, frame: FrameType) -> Any:
    """What the frame's variables hold below this name; None where its text is not the recipe's."""
    match function:
        case ast.Name(id=name) if is_own_file(frame.f_code.co_filename):
            return {**frame.f_globals, **frame.f_locals}.get(name)
        case ast.Attribute(value=value, attr=attribute):
            return getattr(_value_of(value, frame), "__dict__", {}).get(attribute)
        case _:
            return None


def _is_next(function: Any) -> bool:
    """`advance = steps.__next__` and `partial(next, steps, None)` keep no count."""
    if type(function) is partial:
        return _is_next(function.func)
    is_bound = isinstance(function, (MethodWrapperType, BuiltinFunctionType))
    return is_bound and function.__name__ in _ASKING


def holder(sources: list[Any]) -> str:
    """What takes the steps from one of these by compiled code that counts, if anything does."""
    level = [each for each in sources if each is not None]  # all objects refer to that
    seen = set[int]()
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
