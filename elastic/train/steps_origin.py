"""A loop around the steps may run where each of its passes, or each call, makes its own steps.

Where run.steps was called is known by its frames. A generator that calls it when its first step is
asked for may have been made long before: what variables hold when the first step is asked for, and
whether the text of this pass assigns them, tells that. What nothing holds is of this pass.
"""

import ast
import gc
import weakref
from collections.abc import Iterator
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR, CO_OPTIMIZED
from itertools import takewhile
from types import AsyncGeneratorType, FrameType, FunctionType, GeneratorType
from typing import Any

from elastic.data.own_files import is_own_file
from elastic.train.assigned_before import Target, assigned_before, is_certain
from elastic.train.text_place import TextPlace, place_of

_DEPTH = 16  # of what holds what holds the steps
_MANY = 200  # of these
_UNKNOWN = -1


class StepsOrigin:
    """made: the frames that run.steps was called in, up to a generator; the innermost first."""

    def __init__(self, iterator: Iterator[Any], frame: FrameType | None) -> None:
        self._iterator = weakref.ref(iterator)
        self.made: dict[int, TextPlace] = {}
        self._is_made_by_generator = False
        for each in own_frames(frame):
            self.made[id(each)] = place_of(each)
            if is_generator(each):  # what is above has asked for its first item
                self._is_made_by_generator = True
                break

    @property
    def iterator(self) -> Iterator[Any] | None:
        return self._iterator()

    def is_of_each_pass(self, asking: list[FrameType], loop: ast.AST) -> bool:
        """asking: the frames that ask for the first step, the last of which is that of the loop."""
        sources = self._sources(asking[:-1], asking)
        return sources is None or self._is_new(sources, asking[-1], asking, scope=loop)

    def is_of_each_call(self, asking: list[FrameType]) -> bool:
        """Whether one of these functions makes the steps by each call of it."""
        return self._sources(asking, asking) is None

    def _sources(self, below: list[FrameType], asking: list[FrameType]) -> list[Any] | None:
        """What the frame above these has the steps from; None if each call of one makes them."""
        sources: list[Any] = [self.iterator]
        for frame in below:
            is_own = is_own_file(frame.f_code.co_filename)
            if is_own and self._is_new(sources, frame, asking, scope=None):
                if not is_generator(frame):
                    return None
                sources = []
            if is_generator(frame):
                sources += generators_of([frame])
        return sources

    def _is_new(self, sources: list[Any], frame: FrameType, asking: list[FrameType], scope: object) -> bool:
        """scope: of the frame, a loop; None for all of it. sources: of the steps."""
        place = place_of(frame)
        if not place.path:
            return False
        path = place.path[place.path.index(scope) :] if scope in place.path else place.path
        if any(each is self.iterator for each in sources):
            made = self._made_in(frame)
            if made is None and not self._is_made_by_generator:
                return False
            if made is not None and scope is not None and scope not in made.loops():
                return False
            if made is not None and self._is_certainly_made(frame, asking, scope):
                return True
        return _is_assigned(sources, frame, path)

    def _made_in(self, frame: FrameType) -> TextPlace | None:
        made = self.made.get(id(frame))
        return made if made is not None and made.code is frame.f_code else None

    def _is_certainly_made(self, frame: FrameType, asking: list[FrameType], scope: object) -> bool:
        """Whether each pass comes to run.steps, in the functions below as well."""
        alive = {id(each): place_of(each) for each in asking if self._made_in(each) is not None}
        for each in (*takewhile(lambda each: each != id(frame), self.made), id(frame)):
            path = self.made[each].path
            if each == id(frame) and scope is not None:
                path = path[path.index(scope) :]
            now = alive.get(each)
            if not path or not is_certain(path, now.path if now else (), returns=now is None):
                return False
        return True


def own_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the recipe's own code, from this one up."""
    while frame is not None:
        if is_own_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR))


def generators_of(frames: list[FrameType]) -> list[Any]:
    """Frames do not tell."""
    of_generators = [each for each in frames if is_generator(each)]
    found = gc.get_referrers(*of_generators) if of_generators else []
    return [each for each in found if isinstance(each, (GeneratorType, AsyncGeneratorType))]


def _is_assigned(sources: list[Any], frame: FrameType, path: tuple[ast.AST, ...]) -> bool:
    """Whether whatever holds a source was assigned in this pass, which the path leads through."""
    own = frame.f_locals if frame.f_code.co_flags & CO_OPTIMIZED else {}
    variables = {**frame.f_globals, **own}
    filled = {id(variables), id(own), id(sources)}  # these look themselves
    holders, _ = _holders(sources, filled)
    holding = _holding(holders, variables, own)
    new = _new_targets(path, holding)
    # What an object holds by attributes that are new is new under all its other names.
    for name, attributes in holding.items():
        if attributes and all((name, each) in new for each in attributes):
            filled |= {id(variables[name]), id(vars(variables[name]))}
    holders, modules = _holders(sources, filled)
    is_new = all((name, "") in new for name in _holding(holders, variables, own))
    return is_new and modules <= {id(frame.f_globals)}


def _new_targets(path: tuple[ast.AST, ...], holding: dict[str, set[str]]) -> set[Target]:
    """Those with a value that comes from nothing that holds a source from before."""
    new = set[Target]()

    def is_stale(read: Target) -> bool:
        name, attribute = read
        is_source = name in holding and (not attribute or attribute in holding[name])
        return is_source and (name, "") not in new and read not in new

    for each in assigned_before(path):
        new = new - each.targets if any(map(is_stale, each.reads)) else new | each.targets
    return new


def _holding(holders: set[int], variables: dict[str, Any], own: dict[str, Any]) -> dict[str, set[str]]:
    """The variables that hold a source, each with the attributes of its value that do."""
    found = {}
    for name, value in variables.items():
        # A function that holds variables of the frame holds what they will be.
        if id(value) in holders and not _is_of_these(value, own):
            attributes = getattr(value, "__dict__", {}).items()
            found[name] = {each for each, held in attributes if id(held) in holders}
    return found


def _is_of_these(value: Any, own: dict[str, Any]) -> bool:
    return isinstance(value, FunctionType) and bool(own.keys() & value.__code__.co_freevars)


def _holders(sources: list[Any], filled: set[int]) -> tuple[set[int], set[int]]:
    """What refers to the sources, or to what does, and modules of the recipe that do.

    filled: objects that are not looked at. Beside the ids of modules there is one of none where
    this cannot be told.
    """
    level = [each for each in sources if each is not None]  # all objects refer to None
    holders, modules = set(map(id, level)), set[int]()
    for _ in range(_DEPTH):
        if not level:
            break
        if len(holders) > _MANY:  # the search would take minutes
            return holders, {_UNKNOWN}
        following = []
        for each in gc.get_referrers(*level):  # a list that a name kept would be one of the next
            if id(each) in holders or each is level or id(each) in filled:
                continue
            if isinstance(each, FrameType):
                continue
            if isinstance(each, dict) and "__builtins__" in each:
                if is_own_file(each.get("__file__", "")):
                    modules.add(id(each))
                continue
            holders.add(id(each))
            following.append(each)
        level = following
    return holders, modules
