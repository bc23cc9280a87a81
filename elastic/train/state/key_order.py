"""The dicts of torch's own objects come back in the order of keys that they were saved with.

The order is no part of the state there (`Order.FREE`): what a digest is made of has sorted keys.
But a recipe may go through an optimizer's state, and add up floats in that order. So the orders
stand beside the state, each once: the dicts of an optimizer have a few sets of keys between them.
Two dicts of the same keys in different orders get the order of the first.
"""

from collections.abc import Iterable
from typing import Any

Keys = list[str | int]


def key_orders(value: Any) -> list[Keys]:
    """The orders of keys in a value of dicts and lists that are not sorted."""
    found: dict[tuple[Any, ...], None] = {}
    _add(value, found)
    return [list(keys) for keys in found if list(keys) != sorted(keys, key=_rank)]


def in_order(value: Any, orders: Iterable[Keys]) -> Any:
    """The same value, whose dicts were sorted, in these orders."""
    by_keys: dict[frozenset[Any], Keys] = {}
    for keys in orders:
        by_keys.setdefault(frozenset(keys), keys)
    return _ordered(value, by_keys) if by_keys else value


def _add(value: Any, found: dict[tuple[Any, ...], None]) -> None:
    if isinstance(value, dict):
        found.setdefault(tuple(value))
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        if isinstance(item, dict | list | tuple):
            _add(item, found)


def _ordered(value: Any, by_keys: dict[frozenset[Any], Keys]) -> Any:
    if isinstance(value, dict):
        for key in by_keys.get(frozenset(value), ()):
            value[key] = value.pop(key)
        for key, item in value.items():
            value[key] = _ordered(item, by_keys)
    elif isinstance(value, list):
        value[:] = [_ordered(item, by_keys) for item in value]
    elif type(value) is tuple:
        return tuple(_ordered(item, by_keys) for item in value)
    return value


def _rank(key: str | int) -> tuple[bool, str | int]:
    return type(key) is str, key
