"""The function given to `mean_loss` or `sum` leaves nothing behind that another worker would lack.

Each worker calls it for its own shards. What it counts or collects outside its result is therefore
of some shards alone, and another at another number of workers. So in the first step of a run, and
in audited steps for functions that were not seen there, what it could change is read before and
after its first call (reachable.py). If nothing changed, that is all. Otherwise the call is made
again, twice for the same shard and once for another one, each from what was there before:

- What a second call of the same shard changes once more is a memory: a counter, a sum, a list that
  grows, a hidden state. It is refused.
- What each shard writes to places of its own (the priorities of its samples), or into a tensor or
  an array outside of the modules, is refused too.
- What stays at the second call, and is another number for another shard, was initialised by the
  first shard. It is refused.
- The rest is an output, which each call replaces, or a cache, which depends on shapes alone.

It does not find what only a later call does, nor what it cannot reach. Afterwards everything is put
back, as if the function had been called for the training alone.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic.data.loader import Batch
from elastic.errors import UsageError
from elastic.train.audit import Auditor, Call, Compute
from elastic.train.audit_evidence import tensor_checksum
from elastic.train.callables import bound_by, code_key, is_wrapper, wrapped_by
from elastic.train.own_code import is_own_class
from elastic.train.reachable import sites_of
from elastic.train.site import WHOLE, Content, Form, Note, Site, note, put_back

COPIED_BYTES = 2**24
DEPTH = 3
_ABSENT = object()  # there is no such key
_HALF = 0.5


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
    changed = []
    for key in dict.fromkeys([*runs.first, *runs.second, *runs.before]):
        before, first, second = (each.get(key, _ABSENT) for each in (runs.before, runs.first, runs.second))
        if not (_is_same(before, first) and _is_same(first, second)):
            changed.append((key, before, first, second))
    for key, _, first, second in changed:
        if content_of(first) != content_of(second):
            name = site.name_of(key)
            return _of_generator(name) if site.form is Form.GENERATOR else _of_memory(name)
    if runs.other is None:
        return None
    for key, before, first, second in changed:
        other = runs.other.get(key, _ABSENT)
        is_written_again = second is not first or isinstance(first, bool | int | float)
        if _is_container(site, is_written_again) and _is_same(before, other):
            return _of_store(site.path)
        if second is first and before is not first and _are_other_numbers(first, other):
            return _of_initialisation(site.name_of(key))
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
        return _of_store(site.path)
    other: Any = None if runs.other is None else runs.other.get(WHOLE)
    if other is None or not before.shape == first.shape == other.shape:
        return None
    ours, theirs = first != before, other != before
    is_elsewhere = int((ours & theirs).sum()) < _HALF * int(ours.sum())
    return _of_store(site.path) if is_elsewhere else None


def content_of(value: Any, depth: int = DEPTH) -> str:
    """The same for equal numbers, words, tensors, and containers of them; others are all alike."""
    match value:
        case Tensor() if value.layout is torch.strided and value.device.type != "meta":
            return tensor_checksum(value)
        case np.ndarray() if not value.dtype.hasobject:
            return hashlib.sha256(f"{value.dtype} {value.shape}".encode() + value.tobytes()).hexdigest()
        case None | bool() | int() | float() | complex() | str() | bytes():
            return f"{type(value).__name__} {value!r}"
        case dict() if depth:
            return repr({repr(key): content_of(item, depth - 1) for key, item in value.items()})
        case list() | tuple() | deque() if depth:
            return repr([content_of(item, depth - 1) for item in value])
        case set() | frozenset():
            return repr(sorted(map(repr, value)))
        case _:
            return "nothing" if value is _ABSENT else "something"


def _is_same(one: Any, other: Any) -> bool:
    is_number = isinstance(one, bool | int | float | str) and type(one) is type(other)
    return one is other or (is_number and repr(one) == repr(other))


def _are_other_numbers(one: Any, other: Any) -> bool:
    """Floats alone: a size that a cache has reached is a whole number, or a shape."""
    match one, other:
        case float(), float():
            return content_of(one) != content_of(other)
        case (Tensor(), Tensor()) | (np.ndarray(), np.ndarray()):
            is_float = one.is_floating_point() if isinstance(one, Tensor) else one.dtype.kind == "f"
            return is_float and one.shape == other.shape and content_of(one) != content_of(other)
        case _:
            return False


class SideEffects:
    """Looks for them, each function once. auditor: its parts; nothing is audited here."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        self._seen: set[object] = set()  # the codes of functions, and the objects that they work on

    def begin(self, function: Callable[..., Any]) -> "FirstCall | None":
        """Before the first call of a pass. None of a function that was seen before."""
        key = _key_of(function)
        if key in self._seen:
            return None
        self._seen.add(key)
        return FirstCall(self._auditor, function)


def _key_of(function: Callable[..., Any]) -> object:
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


class FirstCall:
    """What a function could change was read; the training calls it now for one of its shards."""

    def __init__(self, auditor: Auditor, function: Callable[..., Any]) -> None:
        self._auditor = auditor
        self._sites = sites_of(auditor.state, [function])
        self._before = self._note()

    def end(self, step: int, call: Call, shard: int, compute: Compute) -> None:
        """The call is over. Raises UsageError for what it leaves behind."""
        after = self._note()
        if not any(map(_has_changed, self._sites, self._before.contents, after.contents)):
            return
        loader = self._auditor.loader
        others = [each for each in range(loader.order.shards) if each != shard]
        # Loaded before anything is called: a data set may count, or fill a cache, as it is loaded.
        same, again = loader.shard(step, shard), loader.shard(step, shard)
        other = loader.shard(step, others[0]) if others else None
        with self._auditor.undisturbed():
            put_back(self._sites, self._before)
            first, second = self._call(call, same, compute), self._call(call, again, compute)
            put_back(self._sites, self._before)
            third = None if other is None else self._call(call, other, compute)
            put_back(self._sites, after)
        for index, site in enumerate(self._sites):
            runs = Runs(
                before=self._before.contents[index],
                first=first.contents[index],
                second=second.contents[index],
                other=None if third is None else third.contents[index],
            )
            problem = problem_of(site, runs)
            if problem is not None:
                raise UsageError(f"step {step}: {problem}")

    def _call(self, call: Call, batch: Batch, compute: Compute) -> Note:
        compute(call, batch)
        return self._note()

    def _note(self) -> Note:
        return note(self._sites, copied_bytes=COPIED_BYTES)


def _has_changed(site: Site, before: Content, after: Content) -> bool:
    if site.form in (Form.TENSOR, Form.ARRAY, Form.GENERATOR):
        return content_of(before.get(WHOLE)) != content_of(after.get(WHOLE))
    return before.keys() != after.keys() or not all(_is_same(before[key], after[key]) for key in before)


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


def _of_initialisation(name: str) -> str:
    return (
        f"{name} keeps what {_FUNCTION} found in the first shard that this worker computed, and each worker begins with another one. "
        "Initialise it before the loop, on fixed samples"
    )


def _of_generator(name: str) -> str:
    return (
        f"{_FUNCTION} draws from {name}, a generator of its own, so that the numbers depend on which shards this worker computed before. "
        "Use the global generators of torch, Python or NumPy: they are keyed for each shard"
    )
