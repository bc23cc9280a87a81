"""A module that is imported when it is first used.

Each process of pytest-xdist collects all tests, and plays a part of them.
"""

from importlib import import_module
from typing import Any


class Lazy:
    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks, as it collects
            raise AttributeError(name)
        return getattr(import_module(self._module), name)
