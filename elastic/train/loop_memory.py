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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, FunctionType, MappingProxyType, MethodType
from typing import Any

from elastic.data import stale_copies
from elastic.data.stale_copies import is_of_own_class
from elastic.errors import UsageError
from elastic.events import UnsavedVariables
from elastic.train import left_out_code, process_settings, read_ahead
from elastic.train.body_changes import BodyChanges
from elastic.train.body_places import BodyPlaces
from elastic.train.dataset_settings import DatasetSettings
from elastic.train.files_read import FilesRead
from elastic.train.given_data import GivenData
from elastic.train.loading_code import loading_methods
from elastic.train.loop_look import Look, is_added, is_made_late, is_read, is_saved
from elastic.train.loop_variables import Analyses, Loading, LoopVariables, functions_in, loop_variables
from elastic.train.loop_walk import take_look
from elastic.train.module_settings import ModuleSettings
from elastic.train.object_marks import Kind, Weight
from elastic.train.own_code import assigned_by_loop, attributes
from elastic.train.state import State
from elastic.train.unsaved_names import Standing, in_order, root_of, standing
from elastic.train.unsaved_sentences import refusal

FIRST_LOOKS = 4
MANY_SAID = 36
NO_ERRORS: Mapping[str, str] = MappingProxyType({})


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
    places: BodyPlaces
    given: GivenData = field(default_factory=lambda: GivenData({}))
    workers: int = 0  # processes that load samples, which have copies of what they read
    files: FilesRead = field(default_factory=FilesRead)
    _looks: int = 0
    _steps: int = 0
    _before: Look | None = None
    _began: int = 0  # steps that were done when the first look was taken
    _analyses: Analyses = field(default_factory=dict)
    _left_out: int = 0  # functions, when the analyses were made
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
            self._note_unclear(step, sys._getframe(1))  # noqa: SLF001 - the recipe's frame is above
        if self._is_due(step, begins_epoch=begins_epoch):
            self._analyses.clear()
            self.look(step - 1, sys._getframe(1))  # noqa: SLF001 - the recipe's frame is above

    def before_saving(self, step: int, frame: FrameType | None) -> None:
        """At the end of a step, before its state is kept anywhere.

        frame: that of the generator. Raises what `begin` does, for the changes up to here.
        """
        self._note(step, self.body.at_end(step))
        self._note_unclear(step, frame)
        self.look(step, frame, is_kept=True)

    def before_loading(self, step: int) -> None:
        """Raises UsageError for contents of the dataset that the body sets in some steps."""
        self._note(step, self.body.before_loading(step))
        self.settings.before_loading()

    def after_gradients(self) -> None:
        self.settings.after_loading()
        self._changing.update(dict.fromkeys(self.body.after_gradients(), Standing.NUMBER))

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

    def _note_unclear(self, step: int, frame: FrameType | None) -> None:
        names = self.modules.unclear(partial(assigned_by_loop, frame))
        self._note(step, [name for name in names if name not in self._changing])

    def _note(self, step: int, names: list[str]) -> None:
        if names:
            self._changing.update(dict.fromkeys(names, Standing.NUMBER))
            self._say(step, [])

    def _is_due(self, step: int, *, begins_epoch: bool) -> bool:
        if self._before is not None and self._before.passed == step - 1:
            return False  # the state before this step was kept, and a look taken
        count = self._steps
        if count == 1 or step == self.last_step or self.places.wants_look:
            return True
        if count <= FIRST_LOOKS:
            return count == step  # this process began the run; a recovery waits for its first steps
        is_power_of_two = not count & (count - 1)
        return is_power_of_two or (begins_epoch and self._looks < 2 * FIRST_LOOKS)

    def look(self, passed: int, frame: FrameType | None, *, is_kept: bool = False) -> None:
        """passed: steps that are done. is_kept: their state is about to be kept.

        What changed is said then: a process that begins from that state does not see it. Otherwise
        the first looks wait for each other, so that one sentence names all.
        """
        self._looks += 1
        self.given.look(min(passed + 1, self.last_step), frame)
        if left_out_code.count() != self._left_out:
            self._analyses.clear()
            self._left_out = left_out_code.count()
        variables = loop_variables(frame, self._analyses, self._loading())
        self._check_read_ahead(passed, variables)
        now = take_look(self.state, self.settings, self.left_out, variables, passed)
        before, self._before = self._before, now
        if before is None:
            self._began = passed
        else:
            self._compare(before, now)
            self.places.compare(before, now, variables.carried, variables.rewritten)
        now.leaves.clear()
        step = min(passed + 1, self.last_step)
        if is_kept or self._looks >= FIRST_LOOKS or step == self.last_step:
            self._say(step, now.after_loop, now.unreadable)

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
            # Each step may read it from its beginning, and loading from the place that it needs.
            is_first = before.passed == self._began
            if mark.owner == "file" and (is_first or is_read(path, now.read_by_loading)):
                continue
            if self.workers and is_read(path, now.read_by_loading | {"collate"}):
                raise UsageError(stale_copies.refusal(self._place(now), path, self.workers))
            if mark.entry and mark.kind is not Kind.TENSOR and not now.saved[mark.entry].is_module:
                weight = Weight.SAID  # only of tensors the leaves of a state_dict tell that it has them
            if weight is Weight.REFUSED:
                refused.append(path)
            elif root_of(path) not in now.after_loop and not (  # that note says it
                mark.kind is Kind.PLAIN and path in now.set_first
            ):
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

    def _say(self, step: int, after_loop: list[str], errors: Mapping[str, str] = NO_ERRORS) -> None:
        changing = [name for name in in_order(self._changing) if name not in self._said]
        late = [name for name in after_loop if name not in self._said]
        counted = sorted(self.settings.counted - self._said)
        files = self.files.new()
        unreadable = [name for name in errors if name not in self._said]
        if (changing or late or files or counted or unreadable) and len(self._said) < MANY_SAID:
            self._said |= {*changing, *late, *counted, *unreadable}
            self.report(
                UnsavedVariables(
                    step=step,
                    changing=changing,
                    after_loop=late,
                    files=files,
                    by_loading=counted,
                    unreadable=[f"{name} ({errors[name]})" for name in unreadable],
                )
            )
