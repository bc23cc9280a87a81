"""A run is one loop: it begins at any step, since a process that restarts goes on at that step.

A loop around it (`for epoch in range(8):` with `for step in steps:` and a break inside) begins
again in such a process, and so does what a second loop over the same iterator does. A comprehension
collects the steps of one process alone. The frames that ask for each step are compared with those
that asked for the first one, and the text of these with that of the call of run.steps: a loop in
whose every pass run.steps is called again is no loop around the steps.

It does not see what a recipe counts by itself; that is a variable of the loop (loop_memory.py).
"""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import elastic
from elastic.data.own_files import is_own_file
from elastic.errors import UsageError
from elastic.train import indirect_loop
from elastic.train.recipe_text import called
from elastic.train.steps_origin import StepsOrigin, own_frames
from elastic.train.text_place import place_at, place_of

_ADVICE = (
    "Write one loop, `for step in run.steps(data, state):`, in which step.number, step.epoch and step.ends_epoch say where the run is "
    "(`if step.ends_epoch:` before what follows an epoch, `if step.epoch < 4:` for a phase)"
)
_THIS_LIBRARY = f"{Path(elastic.__file__).parent}/"

Sites = list[tuple[CodeType, int]]


class LoopForm:
    """`begin` in run.steps, `check` whenever a step was asked for."""

    def __init__(self) -> None:
        self._origin: StepsOrigin | None = None
        self._sites: Sites | None = None

    def begin(self, iterator: Iterator[Any], frame: FrameType | None) -> None:
        """iterator: what the recipe gets. frame: of the call, or below it."""
        self._origin = StepsOrigin(iterator, frame)

    def check(self, frame: FrameType | None) -> None:
        """frame: that which asks for a step, or one that it called. Raises UsageError."""
        sites = [(each.f_code, each.f_lasti) for each in own_frames(frame)]
        if sites == self._sites:
            return
        before, self._sites = self._sites, sites
        if before is None:
            self._check_first(frame)
        elif not _is_same_loop(before, sites):
            raise UsageError(
                f"the steps of the run are asked for in two places ({_differing(before, sites)}), and a process that restarts begins with the first,"
                f" at whichever step the run goes on. {_ADVICE}"
            )

    def _check_first(self, frame: FrameType | None) -> None:
        has_loop = is_new = False
        frames = list(_above_library(frame))
        for number, each in enumerate(frames):
            if not is_own_file(each.f_code.co_filename):
                continue
            place = place_of(each)
            if place.is_comprehension:
                raise UsageError(
                    f"the steps of the run are taken by a comprehension or a generator expression ({place}), and a process that restarts collects"
                    " only what comes after the step where the run goes on. Write the loop as `for step in run.steps(data, state):`; step.log(...) writes"
                    " a number of each step into the metrics, and elastic.Values(...) in the State keeps what is needed after the loop"
                )
            loops = [*reversed(place.loops())]
            if number and has_loop and indirect_loop.calls(each, frames[number - 1]):
                loops.insert(0, place.path[-1])
            has_loop = has_loop or place.iterates
            for loop in loops:
                if isinstance(loop, ast.While) and not has_loop:
                    has_loop = True  # it is the loop over the steps
                    continue
                # Steps that each pass of a loop makes are made by each pass of the loops around it.
                is_new = is_new or self._is_of_each_pass(frames[: number + 1], loop)
                if not is_new:
                    raise UsageError(
                        f"the steps of the run are asked for ({place}) inside of a loop (line {getattr(loop, 'lineno', '?')}) that begins again in a process"
                        f" that restarts, while the steps go on where they were. {_ADVICE}"
                    )
        if frames and self._origin is not None:
            indirect_loop.check(frames, self._origin, is_direct=self._is_iterated_where_made(frames[0]))

    def _is_of_each_pass(self, asking: list[FrameType], loop: ast.AST) -> bool:
        return self._origin is not None and self._origin.is_of_each_pass(asking, loop)

    def _is_iterated_where_made(self, asking: FrameType) -> bool:
        """Whether it is `for step in run.steps(...)`: nothing is in between."""
        iterated = place_of(asking).iterated
        made = {} if self._origin is None else self._origin.made
        if next(iter(made), None) != id(asking) or not isinstance(iterated, ast.Call):
            return False
        return called(iterated) == "steps" and made[id(asking)].path[-1:] == (iterated,)


def _is_same_loop(before: Sites, sites: Sites) -> bool:
    """Whether it is the same text, or `step = next(it)` before a `while` and again at its end."""
    if [_text_of(each) for each in before] == [_text_of(each) for each in sites]:
        return True
    if len(before) != len(sites) or before[1:] != sites[1:] or not sites:
        return False
    first, now = place_at(*before[0]), place_at(*sites[0])
    one, other = first.statement(), now.statement()
    if first.code is not now.code or one is None or other is None or ast.dump(one) != ast.dump(other):
        return False
    for above, below in pairwise(now.path):
        if isinstance(below, ast.While) and below.body[-1] is other:
            beside = [each for each in ast.iter_child_nodes(above) if isinstance(each, ast.stmt)]
            return one in beside and beside.index(one) + 1 == beside.index(below)
    return False


def _text_of(site: tuple[CodeType, int]) -> tuple[CodeType, object]:
    """Python compiles some text twice, such as the condition of a `while`."""
    code, offset = site
    path = place_at(code, offset).path
    return code, path[-1] if path else offset


def _differing(before: Sites, sites: Sites) -> str:
    """The innermost that differ; of a function that calls itself, where it is called from."""
    differing = [pair for pair in zip(before, sites, strict=False) if pair[0] != pair[1]]
    return ", ".join(dict.fromkeys(str(place_at(*each)) for pair in differing[:1] for each in pair))


def _above_library(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost frame above this library's own generators."""
    while frame is not None and frame.f_code.co_filename.startswith(_THIS_LIBRARY):
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
