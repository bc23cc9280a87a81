"""Foreign data is decoded to the expected type or raises ValueError.

Foreign is what comes from the network, the storage, the run directory and the environment. A value
of the right type may still be a lie: access to those places decides who can write it. `printable`
escapes foreign text before a terminal shows it.
"""

import json
import math
import re
import reprlib
from contextlib import suppress
from types import UnionType
from typing import Annotated, Any, TypeVar, get_args

import msgspec

T = TypeVar("T")

MOST_DIGITS = 18
LARGEST = 10**100
_LABEL = r"[A-Za-z0-9_-]{1,63}"
ENDPOINT = re.compile(
    rf"(?P<host>\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]|{_LABEL}(?:\.{_LABEL})*\.?)(?::(?P<port>[0-9]{{1,5}}))?"
)

# repr of a foreign value may be very long, or fail because the value nests too deep.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


def bounds(*, lowest: int, below: int) -> msgspec.Meta:
    return msgspec.Meta(ge=lowest, lt=below)


def exactly(value: int) -> msgspec.Meta:
    return msgspec.Meta(ge=value, le=value)


def pattern(expression: str, words: str) -> msgspec.Meta:
    """The whole text must match; `words` say what it is."""
    return msgspec.Meta(pattern=rf"\A(?:{expression})\Z", description=words)


Count = Annotated[int, bounds(lowest=0, below=10**12)]
Positive = Annotated[int, bounds(lowest=1, below=10**12)]


def decode(cls: type[T] | UnionType, data: object, *, what: str, exact: bool = True) -> T:
    """The dataclass `cls` from JSON: bytes, text, or a value that was parsed already.

    Its fields are bool, int, float, str, other dataclasses, `list[X]`, `tuple[X, ...]`, `dict[str,
    X]`, X | None, or `Annotated` of the first four with one of the rules above. Numbers are finite
    and below 10**100, so that whatever is computed from them stays a number. A bool is not a
    number; an int may stand for a float. Of a union of dataclasses the first counts whose keys are
    there.

    exact: every key must be there, and no others. Otherwise other keys are ignored, and a missing
    one takes its field's default.

    Raises ValueError that says where in `what` which value was expected, and what was found.
    """
    found = data
    if isinstance(data, bytes | str):
        try:
            found = parse_json(data)
        except ValueError as error:
            raise ValueError(f"expected {what} to be JSON, found {_SHORT.repr(data)} ({error})") from error
    *others, kind = get_args(cls) if isinstance(cls, UnionType) else (cls,)
    for other in others:
        with suppress(ValueError):
            return _converted(other, found, what, exact=exact)  # type: ignore[no-any-return]
    return _converted(kind, found, what, exact=exact)  # type: ignore[no-any-return]


def _converted(kind: Any, found: Any, what: str, *, exact: bool) -> Any:
    try:
        value = msgspec.convert(found, kind)
    except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
        text, _, place = str(error).partition(" - at `$")
        raise ValueError(f"expected {what}{place.rstrip('`')} to be valid, found: {text}") from None
    _check(encode(value), found, what, exact=exact)
    return value


def _check(read: Any, found: Any, place: str, *, exact: bool) -> None:
    """What the types do not say: the size of a number, and the keys of an object."""
    match read:
        case dict():
            if exact and read.keys() != found.keys():
                others = sorted(read.keys() ^ found.keys())
                raise ValueError(
                    f"expected {place} to have {', '.join(read)}, found other keys: {_SHORT.repr(others)}"
                )
            for key, value in read.items():
                if key in found:
                    _check(value, found[key], f"{place}.{key:.80}", exact=exact)
        case list() | tuple():
            for index, value in enumerate(read):
                _check(value, found[index], f"{place}[{index}]", exact=exact)
        case int() | float() if not abs(read) < LARGEST:  # not NaN either
            raise ValueError(f"expected {place} to be a number, found {_SHORT.repr(found)}")
        case _:
            pass


def encode(value: Any) -> Any:
    """The JSON value that `decode` reads back as `value`."""
    return msgspec.to_builtins(value)


def finite(value: object) -> float | None:
    """The float that a JSON number stands for; None for anything else, and for a number beyond the
    largest float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def parse_json(data: bytes | str) -> Any:
    """Raises ValueError for text that is no JSON, or nests too deep to be read."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def parse_number(text: bytes | str) -> int | None:
    """The value of 1 to 18 ASCII digits; None for anything else.

    `int` alone accepts the digits of other scripts, and raises an error for very long numbers.
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if is_number else None


def printable(text: str) -> str:
    """The text with every character escaped that is not shown as itself; newlines and tabs stay.

    Control characters command a terminal, and others reorder what it shows.
    """
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each).strip("'") for each in text)
