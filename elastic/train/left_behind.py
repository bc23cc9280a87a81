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
the step before. A forward that replaces them ends that.

What becomes a number (`item()`), and numbers and tensors written in place that the loop mentions,
are named once: these cannot be followed. It does not see containers of other libraries, places with
`__slots__`, and what hooks on gradients leave behind: the look ends with the forward.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from elastic.data.own_files import is_own_class, is_own_file
from elastic.errors import UsageError
from elastic.train import structure
from elastic.train.lasting import DEPTH
from elastic.train.liveness import names_in_loop
from elastic.train.marked_tensor import LeftBehind, Mark, mark
from elastic.train.object_marks import leaves, storage_of
from elastic.train.own_code import cell_contents
from elastic.train.saved_leaves import SavedLeaves
from elastic.train.site import Form, Site
from elastic.train.state import State

_NAMED = 3
_FUNCTION = "the function given to step.mean_loss or step.sum"
_BODY = "the loop's body"
_MANY_FRAMES = 40
_LOOKS = frozenset({"__get__", "__len__", "__hash__", "__repr__", "__format__", "dim", "size", "numel"})
_CONVERSIONS = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "equal", "allclose"}
)
_DECIDING = "/torch/optim/", "/elastic/train/values.py"
_OF_LIBRARY = "/elastic/"
_ON_BEHALF = "/elastic/train/step.py", "/elastic/train/misuse.py"  # called by the recipe: step.log


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftPlace:
    """What each call replaces, and another shard's call by something else.

    paths: below the key of the site, as lasting.py names them: the tensors that differ.
    has_numbers: whether numbers differ, too.
    """

    site: Site
    key: Any
    paths: frozenset[str]
    has_numbers: bool = False

    @property
    def name(self) -> str:
        return self.site.name_of(self.key)

    def read(self) -> Any:
        match self.site.form, self.site.thing:
            case Form.CELL, cell:
                return next(iter(cell_contents(cell)), None)
            case Form.CLASS, kind:
                return vars(kind).get(self.key)
            case Form.SEQUENCE, items:
                return items[self.key] if self.key < len(items) else None
            case _, names:
                return names.get(self.key)

    def write(self, value: Any) -> None:
        match self.site.form, self.site.thing:
            case Form.CELL, cell:
                cell.cell_contents = value
            case Form.CLASS, kind:
                type.__setattr__(kind, self.key, value)
            case _, holder:
                holder[self.key] = value

    def is_mentioned(self, names: frozenset[str]) -> bool:
        if self.site.form in (Form.NAMES, Form.CLASS):
            return str(self.key) in names
        return self.site.path.partition("[")[0].rpartition(".")[2] in names


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
            marked = value if value is None else self._marked(value, "", place, DEPTH, step=step - 1)
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

    def begin_pass(self, step: int) -> None:
        """Raises UsageError for what the recipe has caught."""
        self._step = step
        if self._error is not None:
            raise self._error
        self._before = [_standing_for(each.read()) for each in self._places]

    def end_pass(self) -> None:
        for place, before in zip(self._places, self._before, strict=True):
            value = place.read()
            if value is not None and _standing_for(value) is not before:
                marked = self._marked(value, "", place, DEPTH)
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
        notes = [_of_earlier_numbers(earlier)] * bool(earlier) + [_of_numbers(others)] * bool(others)
        return "\n".join(notes)

    def refuse(self, its: Mark, does: str) -> None:
        sentence = _of_earlier_step(its, _BODY, does) if its.step else _of_body(its.name, does)
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
                _of_earlier_step(its, _FUNCTION, "computes with it")
                if its.step
                else of_other_call([its.name])
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

    def _marked(self, value: Any, path: str, place: LeftPlace, depth: int, *, step: int = 0) -> Any:
        """The same, with marked tensors; containers are copied, since a batch may hold them too."""
        if isinstance(value, Tensor):
            is_of_shard = type(value) is Tensor and path in place.paths
            return mark(value, Mark(place.name + path, self.check_use, step)) if is_of_shard else value
        if not depth:
            return value

        def inside(name: str, item: Any) -> Any:
            return self._marked(item, path + name, place, depth - 1, step=step)

        match value:
            case dict() if type(value) is dict:
                found = {key: inside(f"[{key!r:.40}]", item) for key, item in value.items()}
                return found if _differ(found.values(), value.values()) else value
            case list() | tuple() | deque() if type(value) in (list, tuple, deque) or hasattr(value, "_make"):
                items = [inside(f"[{index}]", item) for index, item in enumerate(value)]
                make: Any = getattr(value, "_make", type(value))
                return make(items) if _differ(items, value) else value
            case _ if isinstance(value, SimpleNamespace) or is_own_class(type(value)):
                return self._with_marked_attributes(value, inside)
            case _:
                return value

    def _with_marked_attributes(self, value: Any, inside: Callable[[str, Any], Any]) -> Any:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is not dict or isinstance(value, torch.nn.Module):
            return value
        found = {name: inside(f".{name}", item) for name, item in attributes.items()}
        if not _differ(found.values(), attributes.values()):
            return value
        other = object.__new__(type(value))
        object.__getattribute__(other, "__dict__").update(found)
        return other


def of_other_call(names: list[str]) -> str:
    return (
        f"{_FUNCTION} reads what the function of an earlier call has left behind, in {_shown(names)}. That is of the last shard that this worker "
        "computed there, for each shard here: all shards of a call come before the next call. Compute it inside the function that needs it, from its own "
        "batch; or return both numbers from one function; what a sum over the batch tells comes from step.sum"
    )


def _of_earlier_step(its: Mark, reader: str, does: str) -> str:
    return (
        f"{reader} reads {its.name}, which a forward in the loop's body of an earlier step, {its.step}, has left behind, and {does}. No object of the State "
        "saves it: a process that restarts in between has none, or another one, so that the result depends on restarts. Compute it in the step that reads it, "
        "before it is read; or keep it in elastic.Values(name=...), which goes into the State, in the step that computes it, and read it there"
    )


def _of_body(name: str, does: str) -> str:
    return (
        f"the loop's body reads {name}, which {_FUNCTION} has left behind, and {does}. That is of the last shard that this worker computed, so that the result "
        "depends on the number of workers. What the loop needs of all shards: return it from a function, total = step.sum(lambda batch: ...), which is the "
        "same on every worker; a mean over samples is such a sum divided by step.global_batch. What one shard needs of itself: compute it inside the function "
        "that needs it, from its own batch. A part of the loss: add it to the loss that the function returns"
    )


def _of_earlier_numbers(names: list[str]) -> str:
    return (
        f"note: the loop reads {_shown(names)}, which a forward in the loop's body of an earlier step has left behind, and no object of the State saves it: a "
        "process that restarts in between has none, or another one. Where the result depends on it, compute it in the step that reads it, or keep it in "
        "elastic.Values; what is only shown may stay"
    )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _of_numbers(names: list[str]) -> str:
    return (
        f"note: the loop reads {_shown(names)}, which {_FUNCTION} has left behind: it is of the last shard that this worker computed, and another one at another number "
        "of workers. What a forward in the loop's body put there for a later step is lost where a process restarts in between: no state has it. Where the "
        "result or a metric depends on it, return it from a function, step.sum(lambda batch: ...), which is the same on every worker, and keep what a later "
        "step needs in elastic.Values; what is only shown may stay"
    )


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


def _differ(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return any(one is not other for one, other in zip(some, others, strict=True))


def _tensors_of(state: State) -> Iterator[tuple[str, Any]]:
    """And what else its objects save, by a name in each."""
    for module in structure.submodules(state.modules):
        yield from module._buffers.items()  # noqa: SLF001
    leaves = SavedLeaves(state.objects)
    for entry in state.objects:
        yield from ((f"{entry}.{name}", thing) for name, thing in leaves.of(entry))
    for parameter in state.trained:
        yield f"the gradient of {state.name_of(parameter)}", parameter.grad
