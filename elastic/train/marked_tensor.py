"""A marked tensor is like a plain one to all who compute with it, and passes its mark on.

Functions of torch that are given one are told to `Mark.check_use`, which may raise; they then work
on the plain tensors, so that no bit changes. Their results are marked, and so is what they write
to, unless that is a parameter.

A mark ends where a tensor becomes a number or an array; a copy by `copy` or `pickle` is one of the
tensor (`deepcopy` keeps the mark, a file has none).
"""

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mark:
    """name: of the place. check_use: called with the mark, a function of torch and what it writes.

    step: the earlier one whose body left it there; 0 for what is of one shard.
    """

    name: str
    check_use: "CheckUse"
    step: int = 0


CheckUse = Callable[[Mark, Any, list[Tensor]], None]


class LeftBehind(Tensor):
    """A tensor of one shard, or of an earlier step.

    Functions of torch are given `plain`, the tensor itself.
    """

    mark: Mark
    plain: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        marked = [*_marked_in(args), *_marked_in(list(kwargs.values()))]
        its = marked[0].mark
        written = [each for each in _written(func, args, kwargs) if not isinstance(each, LeftBehind)]
        its.check_use(its, func, written)
        result = func(*_plain(args), **_plain(kwargs))
        for each in written:  # scratch space of the body's
            if type(each) is Tensor:
                plain = each.as_subclass(Tensor)
                each.__class__ = LeftBehind
                each.mark, each.plain = its, plain  # type: ignore[attr-defined]
        return _marked_again(result, its, {id(each.plain): each for each in marked})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return mark(copy.deepcopy(self.plain, memo), self.mark)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def mark(tensor: Tensor, its: Mark) -> LeftBehind:
    _keep_out_of_graphs()
    marked: LeftBehind = tensor.as_subclass(LeftBehind)
    vars(marked).update(vars(tensor))  # what the recipe has given it
    marked.mark, marked.plain = its, tensor
    return marked


def _keep_out_of_graphs() -> None:
    """What torch.compile makes knows no marks: a function that is given one runs as written."""
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None and LeftBehind not in config.nontraceable_tensor_subclasses:
        config.nontraceable_tensor_subclasses = {*config.nontraceable_tensor_subclasses, LeftBehind}


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What this function of torch writes to, by its name."""
    called = getattr(function, "__name__", "")
    is_in_place = called.endswith("_") and not called.endswith("__")
    found = [kwargs["out"]] if "out" in kwargs else []
    if args and (is_in_place or called in ("__setitem__", "__set__") or called.startswith("__i")):
        found.append(args[0])
    return list(_tensors_in(found))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)


def _marked_in(value: Any) -> Iterator[LeftBehind]:
    if isinstance(value, LeftBehind):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _marked_in(each)


def _plain(value: Any) -> Any:
    if isinstance(value, LeftBehind):
        return value.plain
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {key: _plain(each) for key, each in value.items()} if type(value) is dict else value


def _marked_again(result: Any, its: Mark, known: dict[int, LeftBehind]) -> Any:
    if isinstance(result, Tensor):
        if id(result) in known:
            return known[id(result)]
        return mark(result, its) if type(result) is Tensor else result
    if isinstance(result, (list, tuple)):
        return type(result)([_marked_again(each, its, known) for each in result])
    return result
