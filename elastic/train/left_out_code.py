"""The code of functions whose memory is no business of the loop's.

No pass of the loop runs those that were given to `run.on_step`. Those that were given to a step are
computed twice, in the first step and in audits, which finds what they keep (side_effects.py). A
function that has such a function inside it, as `main()` mostly does, reads nothing by it.
"""

from types import CodeType

_codes: set[CodeType] = set()


def add(function: object) -> None:
    """Objects that can be called are none: their class stands by itself."""
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        _codes.add(code)


def count() -> int:
    return len(_codes)


def is_left_out(code: CodeType) -> bool:
    return code in _codes
