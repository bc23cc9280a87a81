"""A place outside of the State, such as `net.features`, and the marks of the tensors there.

Tensors in containers and in objects of the recipe's own are marked in copies of these: a batch, or
the dataset, may hold the same ones.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from elastic.data.own_files import is_own_class
from elastic.train.lasting import DEPTH, MAX_ITEMS
from elastic.train.marked_tensor import CheckUse, Mark, mark
from elastic.train.own_code import cell_contents
from elastic.train.site import Form, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftPlace:
    """What each call replaces, and another shard's call by something else; or each step's body.

    paths: below the key of the site, as lasting.py names them: the tensors that differ.
    has_numbers: whether numbers differ, too. is_of_shard: what a call leaves is of one shard.
    """

    site: Site
    key: Any
    paths: frozenset[str]
    has_numbers: bool = False
    is_of_shard: bool = True

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

    def marked(self, value: Any, check_use: CheckUse, step: int = 0) -> Any:
        """The same, with marked tensors. step: see Mark."""

        def of_leaf(path: str, tensor: Tensor) -> Tensor:
            is_marked = type(tensor) is Tensor and path in self.paths
            return mark(tensor, Mark(self.name + path, check_use, step)) if is_marked else tensor

        return _with_leaves(value, "", DEPTH, of_leaf)


def tensors_in(value: Any, path: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Tensor]]:
    """With their paths, as LeftPlace has them; of a large container none."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth and not (isinstance(value, (dict, list, tuple, deque)) and len(value) > MAX_ITEMS):
        for name, item in _items(value):
            yield from tensors_in(item, path + name, depth - 1)


def _with_leaves(value: Any, path: str, depth: int, of_leaf: Callable[[str, Tensor], Tensor]) -> Any:
    """The value with other tensors; the same one where all tensors are the same."""
    if isinstance(value, Tensor):
        return of_leaf(path, value)
    items = _items(value) if depth else []
    others = [_with_leaves(item, path + name, depth - 1, of_leaf) for name, item in items]
    is_same = all(other is item for other, (_, item) in zip(others, items, strict=True))
    return value if is_same else _made_of(value, others)


def _items(value: Any) -> list[tuple[str, Any]]:
    match value:
        case dict() if type(value) is dict:
            return [(f"[{key!r:.40}]", item) for key, item in value.items()]
        case list() | tuple() | deque() if type(value) in (list, tuple, deque) or hasattr(value, "_make"):
            return [(f"[{index}]", item) for index, item in enumerate(value)]
        case _ if isinstance(value, nn.Module):
            return []
        case _ if isinstance(value, SimpleNamespace) or is_own_class(type(value)):
            attributes = getattr(value, "__dict__", None)
            return (
                [(f".{name}", item) for name, item in attributes.items()] if type(attributes) is dict else []
            )
        case _:
            return []


def _made_of(value: Any, items: list[Any]) -> Any:
    """Another one of its kind, with other items."""
    match value:
        case dict():
            return dict(zip(value, items, strict=True))
        case list() | tuple() | deque():
            make: Any = getattr(value, "_make", type(value))
            return make(items)
        case _:
            kind = type(value)
            other = kind.__new__(kind) if issubclass(kind, SimpleNamespace) else object.__new__(kind)
            object.__getattribute__(other, "__dict__").update(zip(vars(value), items, strict=True))
            return other
