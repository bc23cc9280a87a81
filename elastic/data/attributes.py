"""What an object has as attributes, in its dict and in its slots, read without code of its own.

A class with `__slots__`, such as one of `dataclass(slots=True)`, keeps them in its descriptors, and
its objects need not have a dict.
"""

from collections.abc import Iterator, MutableMapping
from functools import cache
from types import MappingProxyType, MemberDescriptorType
from typing import Any


def space_of(thing: Any) -> MutableMapping[str, Any]:
    """Its attributes by name, which may be set there: its very dict where it has no slots.

    Empty for what can have none, and for a class, whose own are in `vars`.
    """
    space = dict_of(thing)
    kind: type = type(thing)
    slots = _slots(kind)
    return _Slots(thing, slots, space) if slots else space


def has_space(thing: Any) -> bool:
    """Whether it may have attributes of its own."""
    kind: type = type(thing)
    return hasattr(thing, "__dict__") or bool(_slots(kind))


class _Slots(MutableMapping[str, Any]):
    """The filled slots of an object, and what its dict has beside them."""

    def __init__(
        self, thing: Any, slots: MappingProxyType[str, MemberDescriptorType], space: dict[str, Any]
    ) -> None:
        self._thing, self._slots, self._space = thing, slots, space

    def __getitem__(self, name: str) -> Any:
        member = self._slots.get(name)
        if member is None:
            return self._space[name]
        try:
            return member.__get__(self._thing)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._slots:
            self._slots[name].__set__(self._thing, value)
        else:
            self._space[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._slots:
            self._slots[name].__delete__(self._thing)
        else:
            del self._space[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._space
        yield from (name for name in self._slots if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def dict_of(thing: Any) -> dict[str, Any]:
    """Its own, without a `__getattr__` or property of its class, and without its slots."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


@cache
def _slots(kind: type) -> MappingProxyType[str, MemberDescriptorType]:
    """By their names as attributes: a private one has that of its class in front.

    One that an attribute of a subclass hides is none: no code of the object's can reach it.
    """
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        for name, member in vars(base).items():
            found.setdefault(name, member if "__slots__" in vars(base) else None)
    slots = {name: each for name, each in found.items() if isinstance(each, MemberDescriptorType)}
    return MappingProxyType(dict(reversed(slots.items())))
