"""The function given to `mean_loss` or `sum` leaves nothing behind that another worker would lack.

Each worker calls it for its own shards. What it counts or collects outside its result is therefore
of some shards alone, and another at another number of workers. So in the first step of a run, and
in audited steps, what it could change is read before and after its first call (reachable.py). If
nothing changed that was not allowed before, that is all. Otherwise the call is made
again, twice for the same shard and once for another one, each from what was there before:

- What a second call of the same shard changes once more is a memory: a counter, a sum, a list that
  grows, a hidden state. It is refused.
- What each shard writes to places of its own (the priorities of its samples), or into a tensor or
  an array outside of the modules, is refused too.
- What stays at each later call, and is another number where the first call is of another shard, or
  is made with other weights (lasting.py), was initialised by the first call. It is refused.
- The rest is an output, which each call replaces, or a cache, which depends on shapes alone.

A function that reads what another one of the same step left behind is found by calling it after the
other one was called for its own shard, and for other shards.

It does not find what only calls between two audits do, nor what it cannot reach. Afterwards
everything is put back, as if the function had been called for the training alone.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from elastic.data.loader import Batch
from elastic.data.own_files import is_own_class
from elastic.errors import UsageError
from elastic.train import structure
from elastic.train.audit import Auditor, Call, Compute
from elastic.train.callables import bound_by, code_key, is_wrapper, wrapped_by
from elastic.train.lasting import ABSENT, Parts, content_of, differing, moved, parts_of, unchanged
from elastic.train.left_behind import LeftPlace, of_other_call
from elastic.train.object_marks import storage_of
from elastic.train.reachable import sites_of
from elastic.train.site import BY_NUMBERS, COPIED_BYTES, WHOLE, Content, Form, Note, Site, note, put_back

_HALF = 0.5
MANY_OTHERS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What a site held: before; after a call; after the same once more; after another shard's.

    other: from what was there before; None where there is one shard.
    """

    before: Content
    first: Content
    second: Content
    other: Content | None


def problem_of(site: Site, runs: Runs) -> str | None:
    """Why what the function does to this site cannot be exact; None if it can."""
    if site.form in (Form.TENSOR, Form.ARRAY):
        return _problem_of_numbers(site, runs)
    if site.form is Form.CACHE:  # what it holds is seen by its parts
        return None
    changed = []
    for key in dict.fromkeys([*runs.first, *runs.second, *runs.before]):
        before, first, second = (each.get(key, ABSENT) for each in (runs.before, runs.first, runs.second))
        if not (_is_same(before, first) and _is_same(first, second)):
            changed.append((key, before, first, second))
    for key, _, first, second in changed:
        if content_of(first) != content_of(second):
            name = site.name_of(key)
            return _of_generator(name) if site.form is Form.GENERATOR else _of_memory(name)
    if runs.other is None:
        return None
    for key, before, first, second in changed:
        other = runs.other.get(key, ABSENT)
        is_written_again = second is not first or isinstance(first, bool | int | float)
        if _is_container(site, is_written_again) and _is_same(before, other):
            return _of_store(site.path)
    return None


def _is_container(site: Site, is_written_again: bool) -> bool:
    """Whose items each call writes.

    A dict that keeps those that it has is a cache. A set always keeps them.
    """
    return site.form is Form.SET or (site.form in (Form.MAPPING, Form.SEQUENCE) and is_written_again)


def _problem_of_numbers(site: Site, runs: Runs) -> str | None:
    """Of a tensor or an array that is changed in place."""
    before: Any
    first: Any
    before, first, second = (each.get(WHOLE) for each in (runs.before, runs.first, runs.second))
    if content_of(first) != content_of(second):
        return _of_memory(site.path)
    if content_of(before) == content_of(first):
        return None
    if not site.is_of_module:
        is_whole = before.shape == first.shape and _share(first != before) >= _HALF
        return _of_scratch(site.path) if is_whole else _of_store(site.path)
    other: Any = None if runs.other is None else runs.other.get(WHOLE)
    if other is None or not before.shape == first.shape == other.shape:
        return None
    ours, theirs = first != before, other != before
    is_elsewhere = int((ours & theirs).sum()) < _HALF * int(ours.sum())
    return _of_store(site.path) if is_elsewhere else None


def _share(changed: Any) -> float:
    """Of a tensor or an array of truth values, how many are true."""
    return float(changed.sum()) / max(changed.size if isinstance(changed, np.ndarray) else changed.numel(), 1)


def _is_same(one: Any, other: Any) -> bool:
    is_number = isinstance(one, bool | int | float | str) and type(one) is type(other)
    return one is other or (is_number and repr(one) == repr(other))


class SideEffects:
    """Looks for them, in each function once and in audits. auditor: its parts."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        # By the codes of functions, and the objects that they work on: names of what they change.
        self._seen: dict[object, set[str]] = {}
        self._codes: set[object] = set()  # of all functions, looked at or not
        self._began: int | None = None  # the first step of this process

    def begin(
        self,
        function: Callable[..., Any],
        step: int,
        earlier: Iterable[Call] = (),
        *,
        is_audited: bool = False,
    ) -> "FirstCall | None":
        """Before the first call of a pass. None of a function that was seen before, but in audits.

        earlier: calls of this step's passes before.
        """
        if self._began is None:
            self._began = step
        code = getattr(function, "__code__", type(function))
        is_known = code in self._codes
        self._codes.add(code)
        # A recovery waits for the first step of a later process: an audit looks then.
        if step > 1 and not is_audited and (is_known or step == self._began):
            return None
        key = key_of(function)
        is_again = key in self._seen
        if is_again and not is_audited:
            return None
        of_others = {each_key: each for each in earlier if (each_key := key_of(each.function)) != key}
        known = self._seen.setdefault(key, set())
        many = 1 if is_again else MANY_OTHERS
        return FirstCall(self._auditor, function, [*of_others.values()], known, many_others=many)


def key_of(function: Callable[..., Any]) -> object:
    """Two partials, or closures, of one function may change two modules or objects.

    Functions inside are looked at as the one outside; a tensor is another one in each step.
    """
    parts, waiting, seen = list[object](), [function], set[int]()
    while waiting:
        each: Any = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if is_wrapper(each) or each is function:
            parts += code_key(each)
            waiting += [*wrapped_by(each), *(bound for _, bound in bound_by(each))]
        elif isinstance(each, nn.Module) or is_own_class(type(each)):
            parts.append(id(each))
    return tuple(parts)


_Place = tuple[int, Any]  # the number of a site, and a key there


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """After a call: what the sites hold, and the parts of what they did not hold before."""

    contents: list[Content]
    parts: dict[_Place, Parts]


class FirstCall:
    """What a function could change was read; the training calls it now for one of its shards.

    known: what former looks have found to be changed and allowed; new names are added.
    many_others: shards that earlier calls are made for, to see whether this one depends on them.
    """

    def __init__(
        self,
        auditor: Auditor,
        function: Callable[..., Any],
        earlier: list[Call],
        known: set[str],
        *,
        many_others: int,
    ) -> None:
        self._auditor = auditor
        self._earlier = earlier
        self._known = known
        self._many_others = many_others
        self._sites = sites_of(auditor.state, [function])
        self._before = self._note()

    def end(self, step: int, call: Call, shard: int, compute: Compute) -> list[LeftPlace]:
        """The call is over. Raises UsageError for what it leaves behind, or has found.

        Returns the places whose contents are of one shard, and are replaced by each call.
        """
        self._check_left_behind(step, call, shard, compute)
        after = self._note()
        changed = set(_changed_names(self._sites, self._before, after))
        if changed <= self._known:
            return []
        self._known |= changed
        loader = self._auditor.loader
        others = [each for each in range(loader.order.shards) if each != shard]
        # Loaded before anything is called: a data set may count, or fill a cache, as it is loaded.
        same, again = loader.shard(step, shard), loader.shard(step, shard)
        other = loader.shard(step, others[0]) if others else None
        with self._auditor.undisturbed():
            put_back(self._sites, self._before)
            first, second = self._call(call, same, compute), self._call(call, again, compute)
            kept = {
                place: unchanged(parts, second.parts.get(place, {})) for place, parts in first.parts.items()
            }
            later = moved_first = None
            if any(kept.values()):
                later = self._moved(call, loader.shard(step, (others or [shard])[0]), compute)
                put_back(self._sites, self._before)
                moved_first = self._moved(call, loader.shard(step, shard), compute)
            put_back(self._sites, self._before)
            third = None if other is None else self._call(call, other, compute)
            put_back(self._sites, self._before)
            if any(site.form is Form.CACHE for site in self._sites):
                # It can be emptied, and is filled again by a call alone.
                compute(call, loader.shard(step, shard))
            put_back(self._sites, after)
        for problem in self._problems(first, second, third):
            raise UsageError(f"step {step}: {problem}")
        if later is not None:
            kept = {place: unchanged(parts, later.parts.get(place, {})) for place, parts in kept.items()}
            for problem in self._lasting(kept, third, moved_first):
                raise UsageError(f"step {step}: {problem}")
        return [] if third is None else [*self._of_one_shard(first, second, third)]

    def _check_left_behind(self, step: int, call: Call, shard: int, compute: Compute) -> None:
        """All shards of an earlier call come first, so that it leaves what is of its last one.

        The call is made after earlier ones of its own shard, and of a few others: an accuracy may
        be the same for two of them.
        """
        loader = self._auditor.loader
        others = [each for each in range(loader.order.shards) if each != shard]
        if not self._earlier or not others:
            return
        sites = sites_of(self._auditor.state, [call.function, *(each.function for each in self._earlier)])
        now = note(sites, copied_bytes=COPIED_BYTES)
        left, results = list[str](), list[str]()
        with self._auditor.undisturbed():
            for of_earlier in (shard, *others[: self._many_others]):
                for each in self._earlier:
                    compute(each, loader.shard(step, of_earlier))
                found = note(sites, copied_bytes=COPIED_BYTES)
                left += _changed_names(sites, now, found)
                results.append(content_of(compute(call, loader.shard(step, shard))) if left else "")
                put_back(sites, now)
                if not left or len(set(results)) > 1:
                    break
        if len(set(results)) > 1:
            raise UsageError(f"step {step}: {of_other_call(sorted(set(left)))}")

    def _problems(self, first: "_Seen", second: "_Seen", third: "_Seen | None") -> Iterator[str]:
        """Of what the calls change each time, or write to places of their own."""
        for index, site in enumerate(self._sites):
            runs = Runs(
                before=self._before.contents[index],
                first=first.contents[index],
                second=second.contents[index],
                other=None if third is None else third.contents[index],
            )
            problem = problem_of(site, runs)
            if problem is not None:
                yield problem
        for place, parts in first.parts.items():
            site, now = self._sites[place[0]], second.parts.get(place, {})
            for path in dict.fromkeys([*parts, *now]) if site.form is not Form.CACHE else ():
                if path not in parts or path not in now or parts[path].content != now[path].content:
                    yield _of_memory(site.name_of(place[1]) + path)

    def _lasting(
        self, kept: dict[_Place, Parts], other: "_Seen | None", moved_first: "_Seen | None"
    ) -> Iterator[str]:
        """Of what each later call finds as the first one made it."""
        for place, parts in kept.items():
            name = self._sites[place[0]].name_of(place[1])
            first_of_moved = {} if moved_first is None else moved_first.parts.get(place, {})
            first_of_other = {} if other is None else other.parts.get(place, {})
            if differing(parts, first_of_moved, floats_only=False):
                yield _of_weights(name)
            if differing(parts, first_of_other, floats_only=True):
                yield _of_initialisation(name)

    def _of_one_shard(self, first: "_Seen", second: "_Seen", other: "_Seen") -> Iterator[LeftPlace]:
        for (index, key), parts in first.parts.items():
            again, theirs = second.parts.get((index, key), {}), other.parts.get((index, key), {})
            replaced = [
                path
                for path, part in parts.items()
                if path in theirs
                and theirs[path].content != part.content
                and not (isinstance(part.thing, Tensor) and path in again and again[path].thing is part.thing)
            ]
            tensors = frozenset(path for path in replaced if isinstance(parts[path].thing, Tensor))
            if replaced:
                has_numbers = len(tensors) < len(replaced)
                yield LeftPlace(site=self._sites[index], key=key, paths=tensors, has_numbers=has_numbers)

        for site, ours, others in zip(self._sites, first.contents, other.contents, strict=True):
            is_written = site.form in (Form.TENSOR, Form.ARRAY)
            if is_written and content_of(ours.get(WHOLE)) != content_of(others.get(WHOLE)):
                yield LeftPlace(site=site, key=WHOLE, paths=frozenset(), has_numbers=True)

    def _call(self, call: Call, batch: Batch, compute: Compute) -> _Seen:
        compute(call, batch)
        now, parts, known = self._note(), dict[_Place, Parts](), self._memory_of_state()
        for index, (site, before, content) in enumerate(
            zip(self._sites, self._before.contents, now.contents, strict=True)
        ):
            for key, value in content.items() if site.form not in BY_NUMBERS else ():
                if before.get(key, ABSENT) is not value:
                    parts[index, key] = parts_of(value, known)
        return _Seen(contents=now.contents, parts=parts)

    def _moved(self, call: Call, batch: Batch, compute: Compute) -> _Seen | None:
        """The call with other weights; None where it cannot be made with them."""
        trained = [p for p in self._auditor.state.trained if p.requires_grad]
        with moved(trained), suppress(Exception):
            return self._call(call, batch, compute)
        return None

    def _memory_of_state(self) -> frozenset[int]:
        tensors = (
            tensor
            for module in structure.submodules(self._auditor.state.modules)
            for tensor in (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
            if tensor is not None
        )
        return frozenset(map(storage_of, tensors)) - {0}

    def _note(self) -> Note:
        return note(self._sites, copied_bytes=COPIED_BYTES)


def _has_changed(site: Site, before: Content, after: Content) -> bool:
    if site.form in (Form.TENSOR, Form.ARRAY, Form.GENERATOR):
        return content_of(before.get(WHOLE)) != content_of(after.get(WHOLE))
    return before.keys() != after.keys() or not all(_is_same(before[key], after[key]) for key in before)


def _changed_names(sites: list[Site], before: Note, after: Note) -> Iterator[str]:
    for site, was, now in zip(sites, before.contents, after.contents, strict=True):
        if _has_changed(site, was, now):
            is_whole = site.form in BY_NUMBERS
            changed = [] if is_whole else [key for key in now if not _is_same(was.get(key, ABSENT), now[key])]
            yield from map(site.name_of, changed or [WHOLE])


_FUNCTION = "the function given to step.mean_loss or step.sum"


def _of_memory(name: str) -> str:
    return (
        f"{name} changes with each call of {_FUNCTION}, which every worker calls for its own shards alone, so that it depends on "
        "the number of workers. What is to be added up: return it from the function, through step.sum, and add the sum in the loop's "
        "body, to a buffer or to elastic.Values in the State. What follows the step: set it from step.number before the call. "
        "What collects outputs: empty it when the function begins"
    )


def _of_store(name: str) -> str:
    return (
        f"{name} is filled by {_FUNCTION}, and so by each worker with its own shards only. Return the numbers through step.sum (those of "
        "samples at their places in a tensor of zeros, such as torch.zeros(len(dataset)).index_add(0, batch.indices, errors)), and write "
        "the sum in the loop's body, to a buffer or an object of the State"
    )


def _of_scratch(name: str) -> str:
    return (
        f"{name} is written anew by each call of {_FUNCTION}, and then holds what is of this worker's last shard. Make a fresh one inside the function "
        "and leave this one out: noise = torch.randn_like(x) in the place of noise.normal_(), y = torch.mul(x, 2) in the place of out=y. What the loop "
        "needs of it: return it from the function, through step.sum"
    )


def _of_initialisation(name: str) -> str:
    return (
        f"{name} keeps what {_FUNCTION} found in the first shard that this worker computed, and each worker begins with another one. "
        "Initialise it before the loop, on fixed samples"
    )


def _of_weights(name: str) -> str:
    return (
        f"{name} keeps what {_FUNCTION} made of the weights at its first call, and later calls find it there: a worker that resumes, or that "
        "begins with another shard, would make something else. What is to last (a copy of the model for a penalty, a teacher): make it before the "
        "loop, give it to the State, and change it in the loop's body. What belongs to one step: make it in the body of each step, before the call"
    )


def _of_generator(name: str) -> str:
    return (
        f"{_FUNCTION} draws from {name}, a generator of its own, so that the numbers depend on which shards this worker computed before. "
        "Use the global generators of torch, Python or NumPy: they are keyed for each shard"
    )
