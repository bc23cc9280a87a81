"""What a function of a step leaves behind is of one shard, and is marked until it is replaced.

Each worker calls the function for its own shards alone. So an attribute, a variable or an item that
each call replaces (features, logits, a part of the loss) holds after the calls what is of this
worker's last shard: another one at another number of workers. The first look at a function finds
the places whose contents differ between two shards (side_effects.py). From then on, after the calls
of each pass, the tensors there are replaced by marked views (`LeftBehind`), and what the recipe
computes from these is marked too. The run ends where a marked tensor reaches the State, a gradient,
a decision in the recipe's own code, or another function of a step; to print one is harmless.

A forward in the loop's body, after the calls, puts plain tensors there. No state has them, and a
process that restarts begins without them. So where the next step begins they are marked, too, as of
the step before. A forward that replaces them ends that. body_places.py finds the places that only
the body fills.

What becomes a number (`item()`), and numbers and tensors written in place that the loop mentions,
are named once: these cannot be followed. It does not see containers of other libraries, places with
`__slots__`, and what hooks on gradients leave behind: the look ends with the forward.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from weakref import ref

from torch import Tensor

from elastic.data.own_files import is_own_file
from elastic.errors import UsageError
from elastic.train import structure
from elastic.train.left_place import LeftPlace, tensors_in
from elastic.train.left_sentences import (
    BODY,
    FUNCTION,
    of_body,
    of_earlier_numbers,
    of_earlier_step,
    of_numbers,
    of_other_call,
)
from elastic.train.liveness import names_in_loop
from elastic.train.marked_tensor import LeftBehind, Mark
from elastic.train.object_marks import leaves, storage_of
from elastic.train.saved_leaves import SavedLeaves
from elastic.train.state import State

_MANY_FRAMES = 40
_LOOKS = frozenset({"__get__", "__len__", "__hash__", "__repr__", "__format__", "dim", "size", "numel"})
_CONVERSIONS = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "equal", "allclose"}
)
_DECIDING = "/torch/optim/", "/elastic/train/values.py"
_OF_LIBRARY = "/elastic/"
_ON_BEHALF = "/elastic/train/step.py", "/elastic/train/misuse.py"  # called by the recipe: step.log


class Leftovers:
    """Of one process. Call `begin_step`, `begin_pass` and `end_pass` around the calls of each pass,
    and `end_step`.

    is_computing: whether a function of a step is being called.
    """

    def __init__(self, state: State, is_computing: Callable[[], bool]) -> None:
        self._state = state
        self._is_computing = is_computing
        self._places: list[LeftPlace] = []
        self._before: list[object] = []
        self._step = 0
        self._is_used = False  # by the body of this step
        self._read: dict[str, bool] = {}  # as numbers; whether surely those of an earlier step
        self._said: set[str] = set()
        self._saved: dict[str, bool] = {}  # by name of a place: whether the State has what is there
        self._error: UsageError | None = None  # which the recipe may have caught

    def begin_step(self, step: int) -> None:
        self._step = step
        for place in self._places:
            value = place.read()
            marked = place.marked(value, self.check_use, step - 1)
            if marked is not value and not self._is_saved(place, value):
                place.write(marked)

    def _is_saved(self, place: LeftPlace, value: Any) -> bool:
        """Asked once of each place: a state_dict may take long."""
        if place.name not in self._saved:
            found = [storage_of(each) for _, each in leaves([value]) if isinstance(each, Tensor)]
            self._saved[place.name] = not SavedLeaves(self._state.objects).storages().isdisjoint(found)
        return self._saved[place.name]

    def add(self, places: list[LeftPlace], frame: FrameType | None) -> None:
        """What a look at a function has found. frame: of a call in the loop's body, or below it."""
        known = {(id(each.site.thing), each.key) for each in self._places}
        new = [each for each in places if (id(each.site.thing), each.key) not in known]
        mentioned = _mentioned(frame) if any(each.has_numbers for each in new) else frozenset[str]()
        self._read |= {each.name: False for each in new if each.has_numbers and each.is_mentioned(mentioned)}
        self._places += [each for each in new if each.paths]
        self._before += [None for each in new if each.paths]

    def knows(self, tensor: Tensor) -> bool:
        """Whether it is in one of the places."""
        inside = (each for place in self._places for _, each in tensors_in(place.read()))
        return any(tensor is (each.plain if isinstance(each, LeftBehind) else each) for each in inside)

    def begin_pass(self, step: int) -> None:
        """Raises UsageError for what the recipe has caught."""
        self._step = step
        if self._error is not None:
            raise self._error
        self._before = [_standing_for(each.read()) for each in self._places]

    def end_pass(self) -> None:
        for place, before in zip(self._places, self._before, strict=True):
            value = place.read() if place.is_of_shard else None
            if value is not None and _standing_for(value) is not before:
                marked = place.marked(value, self.check_use)
                if marked is not value:
                    place.write(marked)

    def end_step(self) -> str:
        """What is to be said, once. Raises UsageError for a marked tensor that is in the State."""
        if self._error is not None:
            raise self._error
        if self._is_used:
            self._is_used = False
            for name, thing in _tensors_of(self._state):
                if isinstance(thing, LeftBehind):
                    self.refuse(thing.mark, f"makes {name} of it")
        new = [name for name in self._read if name not in self._said]
        self._said.update(new)
        earlier, others = ([name for name in new if self._read[name] is kind] for kind in (True, False))
        notes = [of_earlier_numbers(earlier)] * bool(earlier) + [of_numbers(others)] * bool(others)
        return "\n".join(notes)

    def refuse(self, its: Mark, does: str) -> None:
        sentence = of_earlier_step(its, BODY, does) if its.step else of_body(its.name, does)
        self._error = UsageError(f"step {self._step}: {sentence}")
        raise self._error

    def check_use(self, its: Mark, function: Any, written: list[Tensor]) -> None:
        """Before a function of torch is called with a marked tensor.

        written: the tensors without a mark that it writes to.
        """
        called = getattr(function, "__name__", "")
        if called in _LOOKS:
            return
        if self._is_computing():
            sentence = (
                of_earlier_step(its, FUNCTION, "computes with it") if its.step else of_other_call([its.name])
            )
            self._error = UsageError(f"step {self._step}: {sentence}")
            raise self._error
        self._is_used = self._is_used or called not in _CONVERSIONS
        caller = _caller(sys._getframe(2))  # noqa: SLF001 - that which called torch
        if called == "backward":
            self.refuse(its, "takes gradients of it")
        if called == "__bool__" and caller == "own":
            self.refuse(its, "decides by it")
        if caller == "deciding":
            self.refuse(its, "changes the State by it")
        if called in _CONVERSIONS and caller == "own":
            self._read.setdefault(its.name, its.step > 0)
        if written:
            saved = SavedLeaves(self._state.objects).storages()
            if any(storage_of(each) in saved for each in written):
                self.refuse(its, "changes the State by it")


def _caller(frame: FrameType | None) -> str:
    """Whether the recipe's own code asked, this library, or one that changes the State by it."""
    for _ in range(_MANY_FRAMES):
        if frame is None:
            return ""
        path = frame.f_code.co_filename
        if any(each in path for each in _DECIDING):
            return "deciding"
        if is_own_file(path):
            return "own"
        if _OF_LIBRARY in path and not path.endswith(_ON_BEHALF):
            return "library"
        frame = frame.f_back
    return ""


def _mentioned(frame: FrameType | None) -> frozenset[str]:
    """By the loops in which these frames stand."""
    found = frozenset[str]()
    while frame is not None:
        if is_own_file(frame.f_code.co_filename):
            found |= names_in_loop(frame.f_code, frame.f_lasti).mentioned
            found |= frozenset(frame.f_code.co_freevars + frame.f_code.co_cellvars)
        frame = frame.f_back
    return found


def _standing_for(value: Any) -> object:
    """The same for the same tensor, which it does not keep alive; of others nothing is known."""
    return ref(value) if isinstance(value, Tensor) else object()


def _tensors_of(state: State) -> Iterator[tuple[str, Any]]:
    """And what else its objects save, by a name in each."""
    for module in structure.submodules(state.modules):
        yield from module._buffers.items()  # noqa: SLF001
    leaves = SavedLeaves(state.objects)
    for entry in state.objects:
        yield from ((f"{entry}.{name}", thing) for name, thing in leaves.of(entry))
    for parameter in state.trained:
        yield f"the gradient of {state.name_of(parameter)}", parameter.grad
