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

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.data import stale_copies
from elastic.data.own_files import is_own_class
from elastic.data.record import DataRecord
from elastic.data.stale_copies import is_of_own_class
from elastic.errors import UsageError
from elastic.events import UnsavedVariables
from elastic.observe.log import read_rare
from elastic.train import address_order, process_settings, read_ahead, structure
from elastic.train.address_hash import kind_of
from elastic.train.body_changes import BodyChanges
from elastic.train.dataset_settings import DatasetSettings
from elastic.train.files_read import FilesRead
from elastic.train.given_data import GivenData
from elastic.train.loading_code import loading_methods
from elastic.train.loop_look import Look, is_added, is_made_late, is_read, is_saved
from elastic.train.loop_parts import LoopParts
from elastic.train.loop_variables import Analyses, Loading, LoopVariables, functions_in, loop_variables
from elastic.train.module_settings import PREFIX, ModuleSettings
from elastic.train.namespaces import is_own_namespace, own_classes
from elastic.train.object_marks import Kind, Rules, Weight, containers, plain_text
from elastic.train.object_parts import FREE
from elastic.train.object_walk import Walk
from elastic.train.own_code import attributes, filled_by_hooks
from elastic.train.saved_leaves import SavedLeaves, SavedNumbers, left_out
from elastic.train.state import State
from elastic.train.unsaved_names import Standing, in_order, root_of, standing
from elastic.train.unsaved_sentences import refusal, sentence
from elastic.train.values import Values

FIRST_LOOKS = 4
MANY_SAID = 36
_SAVES_ALL = (LRScheduler, torch.amp.GradScaler, Values)

# Of an object with a state_dict of its own: a tensor that is another one may be derived.
_OF_OBJECT = Rules(rebound=Weight.SAID, in_place=Weight.REFUSED, plain=Weight.SAID)


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
    given: GivenData = field(default_factory=lambda: GivenData({}))
    workers: int = 0  # processes that load samples, which have copies of what they read
    files: FilesRead = field(default_factory=FilesRead)
    _looks: int = 0
    _steps: int = 0
    _before: Look | None = None
    _began: int = 0  # steps that were done when the first look was taken
    _analyses: Analyses = field(default_factory=dict)
    _read_ahead: dict[str, object] = field(default_factory=dict)
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
        self.given.look(min(passed + 1, self.last_step), frame)
        variables = loop_variables(frame, self._analyses, self._loading())
        self._check_read_ahead(passed, variables)
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

    def loading(self) -> tuple[list[FunctionType], dict[str, Any]]:
        """The functions that load samples; and what the dataset and collate were built with, as far
        as these read it.
        """
        functions = list(functions_in(self._loading().called))
        read = frozenset[str]().union(*(attributes(each.__code__)[0] for each in functions))
        return functions, self.settings.built(read)

    def _loading(self) -> Loading:
        """What loads samples: the dataset and what lies in it, collate, and what these hold.

        Of an object only the methods that load: a trainer that has a collate may have a loop, too.
        """
        collate = self.settings.collate
        holders = [each for each in self.settings.holders() if each is not None]
        kinds: list[Any] = [type(each) for each in holders]
        called: list[Any] = [made for kind in kinds for made in loading_methods(kind)]
        for each in holders:
            values = getattr(each, "__dict__", {}).values()
            called += [value for value in values if not is_of_own_class(value)]
        if isinstance(collate, MethodType):
            kind: Any = type(collate.__self__)
            called += loading_methods(kind, collate.__func__.__name__)
        elif not is_of_own_class(collate):
            called.append(collate)
        return Loading(called=tuple(called), is_ahead=self.workers > 0)

    def _check_read_ahead(self, passed: int, variables: LoopVariables) -> None:
        """Raises UsageError for what processes that load samples read of the run, if it changed."""
        if not self.workers:
            return
        read = {name: value for name, value in variables.carried if name in variables.read_by_loading}
        now = read_ahead.marks_of(self.state, read | self.settings.values())
        name = read_ahead.changed(self._read_ahead, now)
        self._read_ahead |= now
        if name:
            raise UsageError(stale_copies.refusal(f"step {passed + 1}", name, self.workers))

    def _take(self, passed: int, variables: LoopVariables) -> Look:
        of_state = SavedLeaves(self.state.objects)
        walk = Walk(
            saved=of_state.storages,
            left_out={id(each) for held in self.left_out for each in (held, *own_classes(held))},
            assigned=frozenset(variables.assigned),
            outputs=filled_by_hooks(structure.submodules(self.state.modules)),
            cells=frozenset(variables.cells),
            rewritten=frozenset(variables.rewritten),
            kept=frozenset(
                id(kind) for held in self.settings.holders() for kind in (held, *type(held).__mro__)
            ),
        )
        saved = {name: self._enter(walk, name, of_state) for name in self.state.objects}
        # What functions read of a module by its variables is known better than its other data.
        for name, value in sorted(variables.carried, key=lambda each: is_own_namespace(each[1])):
            walk.enter(name, value, FREE, owner=_owner(value))
            if callable(value) and not isinstance(value, type):  # another criterion, say, from some step on
                walk.note_which(name, value)
        for name, value in variables.in_some:  # else they are named for the code after the loop
            if isinstance(value, nn.Module) or of_state.has_keys_of(value):
                walk.enter(name, value, replace(FREE, plain=Weight.NONE), owner=_owner(value))
        for name, value in variables.targets:
            walk.enter(name, value, FREE, owner="iterator")
        for patch in variables.patches:
            walk.note_patch(patch)
        for name, value in variables.on_errors:
            walk.enter(name, value, FREE.at_most(Weight.SAID))
        collate = self.settings.collate
        if not isinstance(collate, MethodType | None):
            # What a closure or a partial holds has no other name.
            walk.enter("collate", collate, FREE.at_most(Weight.SAID))
        walk.sets |= self._sets_of_loading()
        if refused := address_order.refusal(walk.sets, variables.iterated):
            raise UsageError(refused)
        return Look(
            passed=passed,
            marks=walk.marks,
            saved={name: each for name, each in saved.items() if each is not None},
            leaves=of_state,
            read=variables.read_by_functions,
            read_by_loading=variables.read_by_loading,
            process=process_settings.read_settings(),
            after_loop=variables.after_loop,
        )

    def _sets_of_loading(self) -> dict[str, str]:
        held = stale_copies.attributes_of(self.settings.dataset, self.settings.collate)
        sets = {name: each.value for name, each in held.items() if isinstance(each.value, (set, frozenset))}
        return {name: kind for name, each in sets.items() if (kind := kind_of(each)) is not None}

    def _enter(self, walk: Walk, name: str, of_state: SavedLeaves) -> SavedNumbers | None:
        """Mark what an object of the State keeps outside its state_dict, or perhaps does."""
        thing: Any = self.state.objects[name]
        if isinstance(thing, nn.Module):
            walk.module_of_state(name, thing)
            for path, tensor in left_out(name, thing, of_state):
                walk.enter(f"{name}.{path}", tensor, FREE, owner="left out")
            return SavedNumbers(is_module=True, numbers=frozenset())
        if isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict:
            walk.optimizer_of_state(name, thing)
            return None
        if isinstance(thing, _SAVES_ALL) and not _has_own_state_dict(thing):
            walk.left_out.add(id(thing))
            if isinstance(thing, Values):  # a load fills what a name of the loop may hold
                walk.left_out |= {id(each) for each in containers(list(vars(thing).values()))}
            return None
        if isinstance(thing, (Optimizer, LRScheduler)):
            walk.optimizer_of_state(name, thing, _OF_OBJECT, entry=name)
        else:
            walk.enter(name, thing, _OF_OBJECT, owner="object", entry=name)
        values = [value for _, value in of_state.of(name) if not isinstance(value, Tensor)]
        has_arrays = any(mark.entry == name and mark.kind is Kind.ARRAY for mark in walk.marks.values())
        return SavedNumbers(
            is_module=False,
            numbers=frozenset(map(plain_text, values)),
            contents=of_state.contents(name, with_arrays=has_arrays),
        )

    def _compare(self, before: Look, now: Look) -> None:
        refused = []
        for path, mark in now.marks.items():
            weight = mark.weight_of_change(
                before.marks.get(path), is_made_late=is_made_late(path, mark, before, self._began)
            )
            if is_added(path, mark, before):
                weight = min(mark.rules.plain, Weight.SAID)
            if weight is Weight.NONE or (mark.entry and is_saved(path, mark, before, now)):
                continue
            if self.workers and is_read(path, now.read_by_loading | {"collate"}):
                raise UsageError(stale_copies.refusal(self._place(now), path, self.workers))
            if mark.entry and mark.kind is not Kind.TENSOR and not now.saved[mark.entry].is_module:
                weight = Weight.SAID  # only of tensors the leaves of a state_dict tell that it has them
            if weight is Weight.REFUSED:
                refused.append(path)
            elif root_of(path) not in now.after_loop:  # that note says it
                self._changing[path] = standing(path, before.marks.get(path), mark, now.read)
        settings, said = process_settings.changed(before.process, now.process)
        self._changing.update(dict.fromkeys(said, Standing.NUMBER))
        since, until = (self._place(each) for each in (before, now))
        if settings:
            raise UsageError(process_settings.refusal(settings, since, until))
        if refused:
            raise UsageError(refusal({path: now.marks[path] for path in refused}, since, until))

    def _place(self, look: Look) -> str:
        is_end = look.passed == self.last_step
        return f"the end of step {look.passed}" if is_end else f"step {look.passed + 1}"

    def _say(self, step: int, after_loop: list[str]) -> None:
        changing = [name for name in in_order(self._changing) if name not in self._said]
        late = [name for name in after_loop if name not in self._said]
        counted = sorted(self.settings.counted - self._said)
        files = self.files.new()
        if (changing or late or files or counted) and len(self._said) < MANY_SAID:
            self._said |= {*changing, *late, *counted}
            self.report(
                UnsavedVariables(
                    step=step, changing=changing, after_loop=late, files=files, by_loading=counted
                )
            )


def _has_own_state_dict(thing: Any) -> bool:
    """Whether the recipe says what it saves, which may be less than what torch's class does."""
    kind = next(each for each in type(thing).__mro__ if "state_dict" in vars(each))
    return is_own_class(kind)


def _said_before(events: Path) -> set[str]:
    """The names that earlier processes of the run have said."""
    found = [each.event for each in read_rare(events, UnsavedVariables)]
    return {name for each in found for name in _names(each)}


def _names(found: UnsavedVariables) -> list[str]:
    return [*found.changing, *found.after_loop, *found.files, *found.by_loading]


def loop_memory(parts: LoopParts, last_step: int, resumed: DataRecord | None) -> LoopMemory:
    """That of a rank's loop; rank 0 records what is found, and says it.

    resumed: what stands beside the state that the loop begins with.
    """

    def report(found: UnsavedVariables) -> None:
        if parts.output is not None:
            known = _said_before(parts.output.events) if parts.generation > 1 else set[str]()
            parts.output.log.record(found)
            if not known.issuperset(_names(found)):
                print(sentence(found), flush=True)
        if parts.trace is not None:
            parts.trace.note(sentence(found))

    dataset, collate = parts.loader.dataset, parts.loader.collate
    settings = DatasetSettings(dataset=dataset, collate=collate)
    modules = ModuleSettings(state=parts.state)
    saved = {} if resumed is None else resumed.settings
    of_modules = {name: text for name, text in saved.items() if name.startswith(PREFIX)}
    modules.put_back(of_modules)
    settings.put_back({name: text for name, text in saved.items() if name not in of_modules})
    body = BodyChanges(
        state=parts.state,
        dataset=dataset,
        settings=modules,
        of_loading=settings.of_loading,
        collate=collate,
    )
    return LoopMemory(
        state=parts.state,
        last_step=last_step,
        left_out=[dataset],
        report=report,
        body=body,
        files=FilesRead(clock=parts.clock, since_s=_began_s(parts)),
        settings=settings,
        modules=modules,
        workers=parts.loader.workers,
        given=GivenData({"dataset": dataset, "collate": collate, **parts.loader.chosen}),
    )


def _began_s(parts: LoopParts) -> float:
    """Seconds since 1970; of a run in an object store, when this process began."""
    if parts.output is not None:
        with suppress(OSError):
            return (parts.output.events.parent / "run.json").stat().st_mtime
    return parts.clock.wall()


def _owner(value: Any) -> str:
    return "module" if isinstance(value, (nn.Module, Optimizer)) else ""
