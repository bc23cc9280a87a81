"""What a loop remembers outside its State is found while it runs, and refused or said.

A process that restarts runs the script from its top. What a pass of the loop changes, and a later
one reads, must be saved by an object of the State; else the run would end with another result, and
no message would say so. Marks of all that the loop can reach and no State saves are taken where a
process begins, in the first steps of a run, then ever more rarely, and whenever a state is about to
be kept that another process may begin from. Each look is compared with the one before. So a process
that saw a change is there to refuse it before a state exists that lacks it.

Tensors, arrays, generators and iterators that change end the run. Numbers, strings and lists of
them may be functions of the step, or only be printed: they are named once on the console. It does
not see what lies in files, or in objects of other libraries that have no state_dict.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.data.record import DataRecord
from elastic.errors import UsageError
from elastic.events import UnsavedVariables
from elastic.snapshot.image import tensor_bytes
from elastic.train import process_settings, structure
from elastic.train.body_changes import BodyChanges
from elastic.train.dataset_settings import DatasetSettings
from elastic.train.flat_state import tensor_sums
from elastic.train.loop_parts import LoopParts
from elastic.train.loop_variables import Analyses, LoopVariables, loop_variables
from elastic.train.module_settings import PREFIX, ModuleSettings
from elastic.train.namespaces import is_own_namespace, own_classes
from elastic.train.object_marks import Kind, Mark, Rules, Weight, containers, leaves, plain_text, storage_of
from elastic.train.object_walk import FREE, Walk
from elastic.train.own_code import filled_by_hooks
from elastic.train.state import State
from elastic.train.unsaved_names import Standing, in_order, standing
from elastic.train.values import Values

FIRST_LOOKS = 4
MANY_NAMES = 4  # on a line of the console, the events have all
MANY_PARTS = 2  # of one object
MANY_SAID = 36
MANY_NUMBERS = 1000
_SAVES_ALL = (LRScheduler, torch.amp.GradScaler, Values)

# Of an object with a state_dict of its own: a tensor that is another one may be derived.
_OF_OBJECT = Rules(rebound=Weight.SAID, in_place=Weight.REFUSED, plain=Weight.SAID)

_ADVICE: dict[Kind | str, str] = {
    Kind.RANDOM: "draw from the global generators of torch, NumPy or Python, which every step sets, or make the generator in "
    "each step from its number, as np.random.default_rng((seed, step.number))",
    Kind.ITERATOR: "an iterator cannot be saved: give the data to run.data, or take by the step what belongs to it, as "
    "dataset[step.number % len(dataset)]",
    Kind.ARRAY: "keep it in elastic.Values(name=array), which goes into the State (Values holds a copy: change values.name); make it in each step before it is read; or "
    "compute it from step.number",
    Kind.TENSOR: "give it to the State in elastic.Values(name=tensor) (Values holds a copy: change values.name), or in a registered buffer of a module there; make it in "
    "each step before it is read; or compute it from step.number",
    "optimizer": "keep it in optimizer.state[parameter], which an optimizer's state_dict saves",
    "buffer": "register the buffer with persistent=True",
    "attribute": "make it a buffer, by self.register_buffer, and update it in the loop",
    "values": "give these Values to the State, State(..., values=values)",
    "schedule": "give it state_dict and load_state_dict, and put it into the State, or compute the rate from step.number",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """Texts of the numbers in the state_dict of an object of the State; none of a module's."""

    is_module: bool
    numbers: frozenset[str]


class _Leaves:
    """What the state_dicts hold at one look, taken where it is needed: most looks need none of it.

    It lasts for a look alone: tensors would keep alive the arrays that they are views of, which a
    trial load takes for a sign that the recipe holds them.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._known: dict[str, list[tuple[str, Any]]] = {}
        self._keys: dict[str, frozenset[str]] = {}
        self._storages: set[int] | None = None

    def of(self, name: str) -> list[tuple[str, Any]]:
        """Those of the object `name`, each with its key. Without State.flatten, which encodes."""
        if name not in self._known:
            self._known[name] = list(leaves(self._objects[name].state_dict()))
        return self._known[name]

    def keys(self, name: str) -> frozenset[str]:
        if name not in self._keys:
            self._keys[name] = frozenset(key.rpartition(".")[2].strip("_") for key, _ in self.of(name))
        return self._keys[name]

    def tensors(self, name: str) -> list[Tensor]:
        return [value for _, value in self.of(name) if isinstance(value, Tensor)]

    def storages(self) -> set[int]:
        """The addresses of all their tensors' memory."""
        if self._storages is None:
            tensors = (tensor for name in self._objects for tensor in self.tensors(name))
            self._storages = {storage_of(tensor) for tensor in tensors} - {0}
        return self._storages

    def clear(self) -> None:
        self._known.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """passed: the number of steps that were done when it was taken."""

    passed: int
    marks: dict[str, Mark]
    saved: dict[str, _Saved]
    leaves: _Leaves
    read: set[str]
    process: process_settings.Settings
    after_loop: list[str]


@dataclass(slots=True, kw_only=True)
class LoopMemory:
    """Call `begin` at the beginning of each step, in the generator that the recipe iterates over,
    and `before_saving` at the end of one whose state is kept.

    left_out: objects that are not looked at, such as the dataset, which `body` watches. report:
    called on each rank with what is to be said; rank 0 says it.
    """

    state: State
    last_step: int
    left_out: list[Any]
    report: Callable[[UnsavedVariables], None]
    body: BodyChanges
    settings: DatasetSettings
    modules: ModuleSettings
    _looks: int = 0
    _steps: int = 0
    _before: _Look | None = None
    _began: int = 0  # steps that were done when the first look was taken
    _analyses: Analyses = field(default_factory=dict)
    _changing: dict[str, Standing] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def begin(self, step: int, *, begins_epoch: bool = False, is_audited: bool = False) -> None:
        """Raises UsageError for what changed since an earlier step and is not saved."""
        if self._steps == 0:
            self.body.before_loop()
        self._steps += 1
        self._note(step, self.body.begin(step, is_audited=is_audited))
        if self.body.is_read:
            self._note(step, [name for name in self.modules.unclear() if name not in self._changing])
        if self._is_due(step, begins_epoch=begins_epoch):
            self._analyses.clear()
            self.look(step - 1, sys._getframe(1))  # noqa: SLF001 - the recipe's frame is above

    def before_saving(self, step: int, frame: FrameType | None) -> None:
        """At the end of a step, before its state is kept anywhere.

        frame: that of the generator. Raises what `begin` does, for the changes up to here.
        """
        self._note(step, self.body.at_end(step))
        self._note(step, [name for name in self.modules.unclear() if name not in self._changing])
        self.look(step, frame)

    def before_loading(self, step: int) -> None:
        """Raises UsageError for contents of the dataset that the body sets in some steps."""
        self._note(step, self.body.before_loading(step))
        self.settings.before_loading()

    def after_gradients(self) -> None:
        self.settings.after_loading()
        self.body.after_gradients()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While it lasts, samples are loaded and modules called, and no body of the loop runs."""
        self.settings.before_loading()
        self.body.read_body()
        yield
        self.settings.after_loading()
        self.body.after_evaluation()

    def set_by_loop(self) -> dict[str, str]:
        """What is to stand beside a state that is saved now: JSON by name."""
        self.body.read_body(with_contents=False)  # `before_saving` has read them
        return self.settings.changed() | self.modules.changed()

    def _note(self, step: int, names: list[str]) -> None:
        if names:
            self._changing.update(dict.fromkeys(names, Standing.NUMBER))
            self._say(step, [])

    def _is_due(self, step: int, *, begins_epoch: bool) -> bool:
        if self._before is not None and self._before.passed == step - 1:
            return False  # the state before this step was kept, and a look taken
        count = self._steps
        if count == 1 or step == self.last_step:
            return True
        if count <= FIRST_LOOKS:
            return count == step  # this process began the run; a recovery waits for its first steps
        is_power_of_two = not count & (count - 1)
        return is_power_of_two or (begins_epoch and self._looks < 2 * FIRST_LOOKS)

    def look(self, passed: int, frame: FrameType | None) -> None:
        """passed: steps that are done."""
        self._looks += 1
        variables = loop_variables(frame, self._analyses)
        now = self._take(passed, variables)
        before, self._before = self._before, now
        if before is None:
            self._began = passed
        else:
            self._compare(before, now)
        now.leaves.clear()
        step = min(passed + 1, self.last_step)
        if self._looks >= FIRST_LOOKS or step == self.last_step:
            self._say(step, now.after_loop)

    def _take(self, passed: int, variables: LoopVariables) -> _Look:
        of_state = _Leaves(self.state.objects)
        walk = Walk(
            saved=of_state.storages,
            left_out={id(each) for held in self.left_out for each in (held, *own_classes(held))},
            assigned=frozenset(variables.assigned),
            outputs=filled_by_hooks(structure.submodules(self.state.modules)),
            cells=frozenset(variables.cells),
            rewritten=frozenset(variables.rewritten),
        )
        saved = {name: self._enter(walk, name, of_state) for name in self.state.objects}
        # What functions read of a module by its variables is known better than its other data.
        for name, value in sorted(variables.carried, key=lambda each: is_own_namespace(each[1])):
            walk.enter(name, value, FREE, owner=_owner(value))
            if callable(value) and not isinstance(value, type):  # another criterion, say, from some step on
                walk.note_which(name, value)
        for name, value in variables.targets:
            walk.enter(name, value, FREE, owner="iterator")
        for name, value in variables.on_errors:
            walk.enter(name, value, FREE.at_most(Weight.SAID))
        return _Look(
            passed=passed,
            marks=walk.marks,
            saved={name: each for name, each in saved.items() if each is not None},
            leaves=of_state,
            read=variables.read_by_functions,
            process=process_settings.read_settings(),
            after_loop=variables.after_loop,
        )

    def _enter(self, walk: Walk, name: str, of_state: _Leaves) -> _Saved | None:
        """Mark what an object of the State keeps outside its state_dict, or perhaps does."""
        thing: Any = self.state.objects[name]
        if isinstance(thing, nn.Module):
            walk.module_of_state(name, thing)
            return _Saved(is_module=True, numbers=frozenset())
        if isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict:
            walk.optimizer_of_state(name, thing)
            return None
        if isinstance(thing, _SAVES_ALL):
            walk.left_out.add(id(thing))
            if isinstance(thing, Values):  # a load fills what a name of the loop may hold
                walk.left_out |= {id(each) for each in containers(list(vars(thing).values()))}
            return None
        if isinstance(thing, Optimizer):
            walk.optimizer_of_state(name, thing, _OF_OBJECT, entry=name)
        else:
            walk.enter(name, thing, _OF_OBJECT, owner="object", entry=name)
        values = [value for _, value in of_state.of(name) if not isinstance(value, Tensor)]
        return _Saved(is_module=False, numbers=frozenset(map(plain_text, values)))

    def _compare(self, before: _Look, now: _Look) -> None:
        refused = []
        for path, mark in now.marks.items():
            weight = mark.weight_of_change(
                before.marks.get(path), is_made_late=_is_made_late(path, mark, before, self._began)
            )
            if _is_added(path, mark, before):
                weight = min(mark.rules.plain, Weight.SAID)
            if weight is Weight.NONE or (mark.entry and _is_saved(path, mark, before, now)):
                continue
            if mark.entry and mark.kind is not Kind.TENSOR and not now.saved[mark.entry].is_module:
                weight = Weight.SAID  # only of tensors the leaves of a state_dict tell that it has them
            if weight is Weight.REFUSED:
                refused.append(path)
            else:
                self._changing[path] = standing(path, before.marks.get(path), mark, now.read)
        settings, said = process_settings.changed(before.process, now.process)
        self._changing.update(dict.fromkeys(said, Standing.NUMBER))
        since, until = (self._place(each) for each in (before, now))
        if settings:
            raise UsageError(process_settings.refusal(settings, since, until))
        if refused:
            raise UsageError(_refusal({path: now.marks[path] for path in refused}, since, until))

    def _place(self, look: _Look) -> str:
        is_end = look.passed == self.last_step
        return f"the end of step {look.passed}" if is_end else f"step {look.passed + 1}"

    def _say(self, step: int, after_loop: list[str]) -> None:
        changing = [name for name in in_order(self._changing) if name not in self._said]
        late = [name for name in after_loop if name not in self._said]
        if (changing or late) and len(self._said) < MANY_SAID:
            self._said |= {*changing, *late}
            self.report(UnsavedVariables(step=step, changing=changing, after_loop=late))


def loop_memory(parts: LoopParts, last_step: int, resumed: DataRecord | None) -> LoopMemory:
    """That of a rank's loop; rank 0 records what is found, and says it.

    resumed: what stands beside the state that the loop begins with.
    """

    def report(found: UnsavedVariables) -> None:
        if parts.output is not None:
            parts.output.log.record(found)
            print(sentence(found), flush=True)
        if parts.trace is not None:
            parts.trace.note(sentence(found))

    dataset = parts.loader.dataset
    settings, modules = DatasetSettings(dataset=dataset), ModuleSettings(state=parts.state)
    saved = {} if resumed is None else resumed.settings
    of_modules = {name: text for name, text in saved.items() if name.startswith(PREFIX)}
    modules.put_back(of_modules)
    settings.put_back({name: text for name, text in saved.items() if name not in of_modules})
    body = BodyChanges(state=parts.state, dataset=dataset, settings=modules, of_loading=settings.of_loading)
    return LoopMemory(
        state=parts.state,
        last_step=last_step,
        left_out=[dataset],
        report=report,
        body=body,
        settings=settings,
        modules=modules,
    )


def sentence(found: UnsavedVariables) -> str:
    """One line for the console."""
    parts = []
    if found.changing:
        more = "; elastic-train report lists all of them" if _is_cut(found.changing) else ""
        parts.append(
            f"no object of the State saves {_listed(found.changing)}, which the loop changes: after a restart it begins again as at the top"
            " of the script. Where the result depends on it, keep it in elastic.Values(...), which goes into the State, or derive it from"
            f" step.number; what is only shown may stay{more}"
        )
    if found.after_loop:
        parts.append(
            f"the script reads {_listed(found.after_loop)} after the loop, which sets it: a process that resumes after the last step that"
            " sets it does not have that value. Keep it in elastic.Values(...), or compute it after the loop"
        )
    return f"note: {'. And '.join(parts)}"


def _refusal(found: dict[str, Mark], since: str, until: str) -> str:
    """found: all that one look found, by path. since, until: where a look was taken."""
    advised: dict[str, list[str]] = {}
    for path, mark in found.items():
        advised.setdefault(_advice(path, mark), []).append(path)
    (advice, *_), is_one = advised, len(advised) == 1
    what_to_do = advice if is_one else "; ".join(f"{_listed(advised[each])}: {each}" for each in advised)
    was, it, is_ = ("was", "it", "it is") if len(found) == 1 else ("were", "them", "they are")
    return (
        f"{_listed([*found])} {was} changed between {since} and {until}, and no object of the State saves {it}. A process that "
        f"restarts runs the script from its top, where {is_} as at the start, so that the run would end with another result: {what_to_do}"
    )


def _advice(path: str, mark: Mark) -> str:
    if mark.entry and mark.owner not in ("buffer", "attribute"):
        return f"let the state_dict of {mark.entry} give it, and its load_state_dict put it back"
    if mark.owner == "module":
        owner = re.match(r"(?:self\.)?(\w+)", path)
        name = "module" if owner is None else owner.group(1)
        return (
            f"give {name} to the State as well, State(..., {name}={'self.' * path.startswith('self.')}{name})"
        )
    if mark.kind in (Kind.RANDOM, Kind.ITERATOR):
        return _ADVICE[mark.kind]
    return _ADVICE.get(mark.owner) or _ADVICE.get(mark.kind) or _ADVICE[Kind.TENSOR]


def _is_cut(names: list[str]) -> bool:
    return re.search(r"\d more", _listed(names)) is not None


def _listed(names: list[str]) -> str:
    """Names for a sentence; several parts of one object as one name."""
    parts: dict[str, list[str]] = {}
    for name in names:
        found = re.match(r"(?:self\.)?\w+", name)
        parts.setdefault(name if found is None else found.group(), []).append(name)
    words = []
    for owner, (first, *others) in parts.items():
        more = _first([each[len(owner) :] for each in others], MANY_PARTS)
        words.append(f"{first} (and {more})" if others else first)
    return _first(words, MANY_NAMES)


def _first(words: list[str], limit: int) -> str:
    if len(words) > limit + 1:  # else the last would be longer as a number
        words = [*words[:limit], f"{len(words) - limit} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _owner(value: Any) -> str:
    return "module" if isinstance(value, (nn.Module, Optimizer)) else ""


def _is_made_late(path: str, mark: Mark, before: _Look, began: int) -> bool:
    """Whether a variable that was None, or a module, has got it after the first step.

    What is made in a process's first step is made when it is first needed, also by the next one.
    Entries that come into a dict may be a cache's.
    """
    former = before.marks.get(path)
    if before.passed <= began or mark.entry or (former is not None and former.kind is not Kind.PLAIN):
        return False
    if mark.owner == "module" or former is not None:
        return True
    places = (path[: found.start()] for found in reversed(list(re.finditer(r"[.\[]", path))))
    above = next((before.marks[place] for place in places if place in before.marks), None)
    return above is not None and above.value == plain_text(None)


def _is_added(path: str, mark: Mark, before: _Look) -> bool:
    """Whether it is a number or the like that an object has got, which was there before.

    As in `if not hasattr(self, "first"): self.first = loss`.
    """
    if mark.kind is not Kind.PLAIN or path in before.marks:
        return False
    owner, dot, name = path.rpartition(".")
    return bool(dot and name.isidentifier() and owner in before.marks)


def _is_saved(path: str, mark: Mark, before: _Look, now: _Look) -> bool:
    """Whether the state_dict of the object that holds it has it, by name or by its contents."""
    known, earlier = now.saved.get(mark.entry), before.saved.get(mark.entry)
    if known is None or earlier is None:
        return False
    names = [each.strip("_") for each in re.findall(r"[A-Za-z_]\w*", path[len(mark.entry) :])]
    if now.leaves.keys(mark.entry).intersection(names[-1:] if known.is_module else names):
        return True
    former = before.marks.get(path)
    if mark.kind is Kind.PLAIN and former is not None and not known.is_module:
        return mark.value in known.numbers and former.value in earlier.numbers
    thing = None if mark.anchor is None else mark.anchor()
    if isinstance(thing, Tensor):
        return _holds_values(known, now.leaves.tensors(mark.entry), thing.detach())
    return False


def _holds_values(known: _Saved, leaves_of: list[Tensor], tensor: Tensor) -> bool:
    """Whether they are those of a leaf, or a part of one (as of torch.stack or a flat vector)."""
    alike = [each for each in leaves_of if each.shape == tensor.shape and each.dtype == tensor.dtype]
    if any(tensor_sums(each) == tensor_sums(tensor) for each in alike):
        return True
    if known.is_module or storage_of(tensor) == 0:
        return False
    if tensor.numel() <= MANY_NUMBERS and all(
        plain_text(each) in known.numbers for each in tensor.flatten().tolist()
    ):
        return True  # as of tolist()
    wanted = _bytes_of(tensor)
    larger = [
        each
        for each in leaves_of
        if each.numel() >= tensor.numel() and each.is_complex() == tensor.is_complex() and storage_of(each)
    ]
    return any(wanted in _bytes_of(each.detach().to(tensor.dtype)) for each in larger)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor_bytes(tensor.cpu()).numpy().tobytes()
