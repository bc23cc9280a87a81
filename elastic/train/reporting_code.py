"""The code of functions that were given to `run.on_step`, which no pass of the loop runs.

A function that has such a function inside it, as `main()` mostly does, reads nothing by it.
"""

from types import CodeType

_codes: set[CodeType] = set()


def add(function: object) -> None:
    """Objects that can be called are none: their class stands by itself."""
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        _codes.add(code)


def is_reporting(code: CodeType) -> bool:
    return code in _codes
