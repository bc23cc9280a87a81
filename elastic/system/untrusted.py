"""Whatever comes from outside becomes a value of the expected kind or a ValueError, and nothing of it commands a terminal.

Outside are the network, the storage, the run directory and the environment. It does not promise that a value is true: who may write there is decided elsewhere.
"""

import json
import math
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

MOST_DIGITS = 18
LARGEST = 10**100


def parse_json(data: bytes | str) -> Any:
    """Raises ValueError for what is not JSON, and for what nests too deep to be read."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def number(text: bytes | str) -> int | None:
    """1 to 18 ASCII digits as a number; None for anything else. Python alone takes other scripts' digits, and refuses long numbers with an error."""
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if is_number else None


def fits(value: object, kind: Any) -> bool:
    """Whether a JSON value is of an annotated type: bool, int, float, str, lists and tuples of these, or None, in any union.

    Numbers are finite and below 10**100, so that whatever is computed from them stays a number; a bool is none.
    """
    if isinstance(kind, UnionType):
        return any(fits(value, each) for each in get_args(kind))
    if get_origin(kind) in (list, tuple):
        return isinstance(value, list) and all(fits(each, get_args(kind)[0]) for each in value)
    if kind is int:
        return type(value) is int and abs(value) < LARGEST
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool) and _is_modest(value)
    return value is None if kind in (None, NoneType) else isinstance(value, kind)


def printable(text: str) -> str:
    """The text with everything escaped that is not shown as itself: a terminal obeys control characters, and reorders by others. Lines and tabs stay."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each).strip("'") for each in text)


def _is_modest(value: float) -> bool:
    # In this order: isfinite refuses integers that no float can hold.
    return abs(value) < LARGEST and math.isfinite(value)
