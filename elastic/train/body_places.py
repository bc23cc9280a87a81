"""Where each step's body leaves another tensor than the step before, what is left there is marked.

A forward of an average network, which the body calls, sets `ema.hidden`; a hook of it fills a dict.
No state has these, and a process that restarts begins without them. No function of a step shows
such a place. So looks that are one step apart show it (loop_memory.py): it holds another tensor
after each of them, two times running. From then on left_behind.py marks what is there as of the
step before: a step that fills it before it reads it is left alone, and one that uses it is refused.

A place that some steps leave as it is may be a cache, or follow the epoch. It is none of these, and
its change is named where loop_memory.py says so. Attributes that only a library assigns are left
out as well: its metrics are shown, mostly.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from elastic.data.own_files import is_own_class, is_own_file
from elastic.train.callables import unwrapped
from elastic.train.derived_weights import derived_names
from elastic.train.left_behind import Leftovers
from elastic.train.left_place import LeftPlace, tensors_in
from elastic.train.loop_look import Look, is_saved
from elastic.train.marked_tensor import LeftBehind
from elastic.train.object_marks import Kind, Mark
from elastic.train.own_code import attributes
from elastic.train.reachable import sites_around
from elastic.train.saved_leaves import holds_values, saves_by_own_code
from elastic.train.site import Form, Site
from elastic.train.state import State

MANY_TRIES = 3  # of one path
MANY_LOOKS = 32  # that are taken for this alone
MANY_ITEMS = 1000  # of one place's site
_FORMS = Form.NAMES, Form.CLASS, Form.CELL, Form.MAPPING, Form.SEQUENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """A tensor that a step has left: not kept alive."""

    tensor: ReferenceType[Tensor]
    form: tuple[torch.Size, torch.dtype]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Left":
        return cls(tensor=ref(tensor), form=(tensor.shape, tensor.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A place, and what the step before left there. A container there is kept for one step."""

    place: LeftPlace
    left: dict[str, _Left]
    holder: Any


class BodyPlaces:
    """Of one process. Call `compare` after each look but the first."""

    def __init__(self, state: State, leftovers: Leftovers) -> None:
        self._state = state
        self._leftovers = leftovers
        self._candidates: list[_Candidate] = []
        self._passed = 0  # steps that were done when the candidates were found
        self._tries: dict[str, int] = {}
        self._looks_left = MANY_LOOKS
        self.wants_look = False  # at the beginning of the next step

    def compare(self, before: Look, now: Look, roots: Iterable[tuple[str, Any]], rewritten: set[str]) -> None:
        """roots: what the loop reaches, by name. rewritten: as LoopVariables has it."""
        if self._candidates and now.passed == self._passed + 1:
            self._hand_over(rewritten)
        self._candidates = []
        replaced = dict(self._replaced(before, now)) if self._looks_left else {}
        if replaced and now.passed == before.passed + 1:
            self._passed = now.passed
            self._candidates = [*self._found(replaced, roots)]
            for path in replaced:
                self._tries[path] = self._tries.get(path, 0) + 1
        self.wants_look = bool(replaced)
        self._looks_left -= self.wants_look

    def _replaced(self, before: Look, now: Look) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are in the place of others, by path, but for what the State saves."""
        for path, mark in now.marks.items():
            former = before.marks.get(path)
            if mark.kind is not Kind.TENSOR or former is None or former.kind is not Kind.TENSOR:
                continue
            tensor = _tensor_of(mark)
            if tensor is None or tensor is _tensor_of(former):
                continue
            if self._tries.get(path, 0) >= MANY_TRIES or self._leftovers.knows(tensor):
                continue
            if not (mark.entry and self._is_saved(path, mark, before, now)) and not self._is_given(
                now, tensor
            ):
                yield path, tensor

    def _is_saved(self, path: str, mark: Mark, before: Look, now: Look) -> bool:
        """A plain module saves what it names alone, and no copy of that by another name."""
        if not is_saved(path, mark, before, now):
            return False
        thing = self._state.objects[mark.entry]
        names_it = path.rpartition(".")[2].strip("_") in now.leaves.keys(mark.entry)
        return names_it or not isinstance(thing, nn.Module) or saves_by_own_code(thing)

    def _is_given(self, now: Look, tensor: Tensor) -> bool:
        """Whether an object of the State saves its values: it may have a second name there."""
        for entry, saved in now.saved.items():
            thing = self._state.objects[entry]
            if isinstance(thing, nn.Module) and not saves_by_own_code(thing):
                continue
            if holds_values(saved, now.leaves.tensors(entry), tensor.detach()):
                return True
        return False

    def _found(self, replaced: dict[str, Tensor], roots: Iterable[tuple[str, Any]]) -> Iterator[_Candidate]:
        wanted = {id(each) for each in replaced.values()}
        sites, modules = sites_around(self._state, roots)
        of_modules = {id(vars(each)): each for each in modules}
        for site in (*sites, *_attributes_of_parameters(self._state)):
            if site.form not in _FORMS or (_is_sized(site) and len(site.thing) > MANY_ITEMS):
                continue
            module = of_modules.get(id(site.thing))
            for key, value in site.read(copies=False).items():
                left = {path: each for path, each in tensors_in(value) if id(_plain(each)) in wanted}
                if left and (module is None or _is_assigned(module, key)):
                    place = LeftPlace(site=site, key=key, paths=frozenset(left), is_of_shard=False)
                    noted = {path: _Left.of(_plain(each)) for path, each in left.items()}
                    yield _Candidate(place=place, left=noted, holder=value if "" not in left else None)

    def _hand_over(self, rewritten: set[str]) -> None:
        """Those that hold other tensors again, of the same form where the code tells of a cache."""
        found = [
            each.place
            for each in self._candidates
            # A container that stays has a place of its own: it may have several names.
            if (each.holder is None or each.holder is not each.place.read()) and _is_filled(each, rewritten)
        ]
        # Those first that need no copy of a container: there may be one of them inside another.
        self._leftovers.add(sorted(found, key=lambda place: place.paths != {""}), None)


def _is_filled(candidate: _Candidate, rewritten: set[str]) -> bool:
    now = dict(tensors_in(candidate.place.read()))
    others = {path: _plain(now[path]) for path in candidate.left if path in now}
    may_be_cache = candidate.place.key in rewritten
    return bool(others) and all(
        candidate.left[path].tensor() is not tensor
        and not (may_be_cache and _Left.of(tensor).form != candidate.left[path].form)
        for path, tensor in others.items()
    )


def _tensor_of(mark: Mark) -> Tensor | None:
    return None if mark.anchor is None else mark.anchor()


def _plain(tensor: Tensor) -> Tensor:
    return tensor.plain if isinstance(tensor, LeftBehind) else tensor


def _is_sized(site: Site) -> bool:
    return site.form in (Form.MAPPING, Form.SEQUENCE)


def _is_assigned(module: nn.Module, name: str) -> bool:
    """By the recipe's own code, and not as a weight that follows from parameters."""
    if is_own_class(type(module)):
        return name not in derived_names(module)
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())  # noqa: SLF001
    own = (
        each.__code__ for hook in hooks for each in unwrapped(hook) if is_own_file(each.__code__.co_filename)
    )
    return any(name in attributes(code)[1] for code in own)


def _attributes_of_parameters(state: State) -> Iterator[Site]:
    for parameter in state.parameters():
        if own := vars(parameter):
            yield Site(path=state.name_of(parameter), form=Form.NAMES, thing=own)
