"""What the loop's body sets in modules of the State and in the dataset, in some steps and not in
others: labels at the beginning of an epoch, a layer that is swapped at step 1000, a list of samples
that grows, a hook. No state_dict has it, and a process that begins between two such steps lacks it.

Attributes are compared by identity, numbers and words by value, containers also by length, tensors
by autograd's count of changes, and of the dataset what it holds (dataset_contents.py). A step is
read three times, and when something differs says who set it:

- body begins .. before its batch is loaded: the body, for this step. In each step that is harmless;
  in some it is not. (An element that is written into the same object may be made from what it was,
  and so counts in each step too.)
- before its batch is loaded .. gradients are there: loading, or the forward.
- gradients are there .. the next body begins: the body, for later steps.

The first steps of a process are read so, and then those whose count is a power of two. Of the other
steps those whose state is kept are read once, at their end, so that what is missing from that state
is found before it is kept. A difference is then taken for the body's, except for names that the
forward, loading or each of the first steps was seen to set.

Numbers and words are saved (dataset_settings.py, module_settings.py) and not named here. Changes
inside arrays of modules and of other objects are not seen.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.data import stale_copies
from elastic.data.stale_copies import SHARED, Attribute, Attributes
from elastic.errors import UsageError
from elastic.train.dataset_contents import DatasetContents, is_record, is_shared
from elastic.train.dataset_settings import is_kept
from elastic.train.derived_weights import derived_names
from elastic.train.loading_code import written_by_loading
from elastic.train.module_attributes import CLASS, Address, ModuleAttributes
from elastic.train.module_settings import ModuleSettings, assigned
from elastic.train.object_marks import OF_CTYPES, containers, leaves, storage_of
from elastic.train.saved_leaves import extra_keys
from elastic.train.state import State
from elastic.train.values import Values

ALL_OF_FIRST = 16
_NOTHING = object()
_OF_DATA = "dataset.", "collate."
_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_CONTENTS = Tensor, np.ndarray, list, tuple, dict, set, deque, bytearray, array, *OF_CTYPES, SHARED


@dataclass(slots=True, kw_only=True)
class BodyChanges:
    """Call `before_loop` once, the next ones in each step, and the others where they say.

    They give the names of what the body sets, as far as it is new and a process that begins at this
    step would lack it, and raise UsageError where that is contents of the dataset, tensors of a
    module that no method of it sets, or its class. of_loading: names of what loading was seen to
    change in the dataset, in any step.
    """

    state: State
    dataset: Any
    settings: ModuleSettings
    of_loading: set[str] = field(default_factory=set)
    collate: Any = None
    _steps: int = 0
    _read_steps: int = 0
    _modules: ModuleAttributes = field(default_factory=ModuleAttributes)
    # Those of the dataset, and hooks outside of modules, as the last reading found them.
    _others: Attributes = field(default_factory=dict)
    _contents: DatasetContents = field(default_factory=DatasetContents)
    _functions: dict[type, Any] = field(default_factory=dict)  # that a class has
    _set_in: dict[str, int] = field(default_factory=dict)  # number of read steps that set it
    _left: set[str] = field(default_factory=set)  # by the forward or by loading; or said already
    is_read: bool = False  # whether this step is
    # Changed before an evaluation, since the last reading; and of all changes those of elements.
    _pending: list[str] = field(default_factory=list)
    _written: set[str] = field(default_factory=set)

    def before_loop(self) -> None:
        self._changed()

    def begin(self, step: int, *, is_audited: bool = False) -> list[str]:
        """is_audited: samples are loaded in this process, whichever process loads them else."""
        self._steps += 1
        is_due = is_audited or self._steps <= ALL_OF_FIRST or not self._steps & (self._steps - 1)
        was_read, self.is_read = self.is_read, is_due
        return self._set_for_later(step, was_read=was_read) if is_due else []

    def at_end(self, step: int) -> list[str]:
        """After the body of a step whose state is about to be kept."""
        return self._set_for_later(step, was_read=self.is_read)

    def _set_for_later(self, step: int, *, was_read: bool) -> list[str]:
        names = self._changed()
        if was_read:  # else the forwards of the steps between may have done it
            self.settings.of_body.update(names)
        else:  # or loading, of which only its code tells
            roots = stale_copies.roots_of(self.dataset, self.collate).values()
            may = [name for name in self._written if any(written_by_loading(each, name) for each in roots)]
            names = [name for name in names if name not in may]
        in_each = {name for name, times in self._set_in.items() if times == self._read_steps}
        return self._new(step, [name for name in names if name not in in_each])

    def before_loading(self, step: int) -> list[str]:
        if not self.is_read:
            return []
        self._read_steps += 1
        names = self._changed()
        self.settings.of_body.update(names)
        for name in names:
            self._set_in[name] = self._set_in.get(name, 0) + 1
        in_some = [name for name, times in self._set_in.items() if times < self._read_steps]
        for name in in_some:
            del self._set_in[name]
        again = [name for name in self._written if self._set_in.get(name, 0) > 1]
        return self._new(step, in_some + again)

    def after_gradients(self) -> list[str]:
        """The names of numbers and words of modules that a function of the step sets now and then.

        A first call may make something, and a forward may keep something for itself; the others are
        settings, as `if step.number == 9: model.drop.p = 0.1`.
        """
        if not self.is_read:
            return []
        names = self._changed()
        late = [name for name in names if self._read_steps > 1 and name not in self._left]
        self._left.update(names)
        self.settings.of_forward.update(names)
        plain = [name for name in late if self._is_of_module(name) and is_kept(self._value(name))]
        return [name for name in plain if not self.settings.is_of_forward(name)]

    def read_body(self, *, with_contents: bool = True) -> None:
        """Before an evaluation, and before a state is saved: what the body has set so far."""
        names = self._read(with_contents=with_contents)
        self._pending += names
        self._written |= self._contents.in_place
        if self.is_read:
            self.settings.of_body.update(names)

    def after_evaluation(self) -> None:
        self._left.update(self._read())

    def _changed(self) -> list[str]:
        """Since the last reading, but for what evaluations changed."""
        written = self._written if self._pending else set[str]()
        names = list(dict.fromkeys([*self._pending, *self._read()]))
        self._written = written | self._contents.in_place
        self._pending.clear()
        return names

    def _read(self, *, with_contents: bool = True) -> list[str]:
        """The names of what is not as it was at the last reading."""
        before = self._others
        attributes = stale_copies.attributes_of(self.dataset, self.collate)
        written = self._contents.read(attributes) if with_contents else []
        self._others = attributes | self._hooks()
        roots = {entry: thing for entry, thing in self.state.objects.items() if isinstance(thing, nn.Module)}
        written = [name for name in written if not self._is_counted(name)]
        names = stale_copies.changed(before, self._others) + self._modules.read(roots)
        return list(dict.fromkeys([*names, *written, *self._replaced_functions()]))

    def _is_counted(self, name: str) -> bool:
        """Whether code that loads samples writes it, in whichever process it runs."""
        roots = stale_copies.roots_of(self.dataset, self.collate).values()
        return is_shared(self._others[name].value) and any(written_by_loading(each, name) for each in roots)

    def _replaced_functions(self) -> list[str]:
        """`forward` of classes of modules, and `__getitem__` of the dataset's."""
        names = []
        kinds = dict.fromkeys(map(type, self.state.submodules()), "forward")
        for kind, name in {**kinds, type(self.dataset): "__getitem__"}.items():
            function = getattr(kind, name, None)
            if self._functions.setdefault(kind, function) is not function:
                self._functions[kind] = function
                names.append(f"class {kind.__qualname__}.{name}")
        return names

    def _hooks(self) -> Attributes:
        """Of parameters, on their gradients, and of optimizers."""
        found = {}
        for parameter in self.state.trained:
            if hooks := parameter._backward_hooks:  # noqa: SLF001 - no public name
                found[f"{self.state.name_of(parameter)}._backward_hooks"] = Attribute(hooks, len(hooks))
        for entry, thing in self.state.objects.items():
            if isinstance(thing, Optimizer):
                for name in _HOOKS:
                    if hooks := vars(thing).get(name):
                        found[f"{entry}.{name}"] = Attribute(hooks, len(hooks))
        return found

    def _new(self, step: int, names: list[str]) -> list[str]:
        new = [name for name in names if name not in self._left and name not in self.of_loading]
        self._left.update(new)
        # A module that took the place of another is named alone, without its attributes.
        found = [name for name in new if name.rpartition(".")[0] not in new and not self._is_saved(name)]
        for name in found:
            value = self._value(name)
            if name.startswith(_OF_DATA) and (isinstance(value, _CONTENTS) or is_record(value)):
                raise UsageError(_refusal(name, value, step))
            if name.endswith(f".{CLASS}") and name.rpartition(".")[0] not in names:
                raise UsageError(_refusal_of_class(name, value, step))
            if _has_tensors(value) and self._is_the_loops(name):
                raise UsageError(_refusal_of_attribute(name, value, step))
        return [name for name in found if not is_kept(self._value(name))]

    def _is_saved(self, name: str) -> bool:
        """Whether the State saves this very tensor or container of the dataset, as Values do.

        Of a module, whether its extra state has an entry of that name, or it follows from the
        parameters.
        """
        value = self._value(name)
        path, _, attribute = name.rpartition(".")
        if isinstance(self._modules.now.get(path), Attribute):
            return attribute in {*extra_keys(self._holder(name)), *derived_names(self._holder(name))}
        if not name.startswith(_OF_DATA) or not isinstance(value, _CONTENTS):
            return False
        states = [thing.state_dict() for thing in self.state.objects.values()]
        if isinstance(value, Tensor):
            tensors = (each for state in states for _, each in leaves(state) if isinstance(each, Tensor))
            return storage_of(value) in {storage_of(each) for each in tensors} - {0}
        held = [vars(thing) for thing in self.state.objects.values() if isinstance(thing, Values)]
        return any(value is each for each in containers([*states, *held]))

    def _value(self, name: str) -> Any:
        """What the last reading found; an object of no kind that counts if there was nothing."""
        found = self._others.get(name) or self._modules.now.get(name)
        if found is None:
            return _NOTHING
        if isinstance(found.value, ReferenceType):
            return found.value()
        if isinstance(found.value, Address):  # what no reading keeps alive
            return vars(self._holder(name)).get(name.rpartition(".")[2], _NOTHING)
        return found.value

    def _holder(self, name: str) -> nn.Module:
        module: nn.Module = self._modules.now[name.rpartition(".")[0]].value
        return module

    def _is_of_module(self, name: str) -> bool:
        return name.rpartition(".")[0] in self._modules.now

    def _is_the_loops(self, name: str) -> bool:
        """Whether no forward sets this attribute: no method of its module assigns it."""
        attribute = name.rpartition(".")[2]
        if not self._is_of_module(name):
            return False
        kind: type = type(self._holder(name))
        return attribute not in assigned(kind)


def _has_tensors(value: Any) -> bool:
    """And no graph, which an output of a forward has."""
    held = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    )
    found = [each for each in held if isinstance(each, Tensor | np.ndarray)]
    return bool(found) and not any(isinstance(each, Tensor) and each.requires_grad for each in found)


def _refusal_of_attribute(name: str, value: Any, step: int) -> str:
    path, _, attribute = name.rpartition(".")
    return (
        f"step {step}: the loop has set {name}, a {type(value).__name__}, in some steps and not in others, and no state_dict has a plain attribute: a process "
        f"that restarts in between would compute with what the script builds. Make it a buffer before the loop, {path}.register_buffer({attribute!r}, ...), and "
        "change that in the loop; or keep it in elastic.Values(name=...), which goes into the State, and set it from there in each step"
    )


def _refusal_of_class(name: str, kind: Any, step: int) -> str:
    path = name.rpartition(".")[0]
    return (
        f"step {step}: the loop has given {path} another class, {kind.__qualname__}, in some steps and not in others, and no state_dict has the class of a module: "
        "a process that restarts in between would compute with what the script builds. Build the module with that class before the loop; or write one class "
        "whose forward goes by a number of the module, which is saved with the State"
    )


def _refusal(name: str, value: Any, step: int) -> str:
    if isinstance(value, (SHARED, *OF_CTYPES)):
        kind = type(value).__name__ + (" of multiprocessing" if isinstance(value, SHARED) else "")
        return (
            f"step {step}: the loop has changed {name}, a {kind}, which no object of the State saves, whichever processes share it: a process that "
            "restarts in between would load other samples, and processes that load ahead (workers=) read it at no fixed step. Make it an attribute with a "
            "number, as in self.epoch = 0: a plain number of the dataset is saved with each state; with workers, apply it to the batch, in the function given "
            "to step.mean_loss or step.sum, from step.number or batch.epoch"
        )
    return (
        f"step {step}: the loop has changed {name}, a {type(value).__name__}, which no object of the State saves: a process "
        "that restarts in between would load other samples. Give it to the State, State(..., values=elastic.Values(name=...)), change it there, and let "
        "the dataset read it from those values; or set another one in each step, made from step.number alone"
    )
