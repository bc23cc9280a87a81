"""Foreign data is decoded to the expected type or raises ValueError.

Foreign is what comes from the network, the storage, the run directory and the environment. A value
of the right type may still be a lie: access to those places decides who can write it. `printable`
escapes foreign text before a terminal shows it.
"""

import json
import math
import re
import reprlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]

MOST_DIGITS = 18
LARGEST = 10**100

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
_IS_NUMBER: dict[type, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and abs(value) < LARGEST,
    float: lambda value: type(value) in (int, float) and abs(value) < LARGEST,  # false for NaN as well
}
# repr of a foreign value may be very long, or fail because the value nests too deep.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What `Annotated[type, rule]` asks of a value of that type; `words` end "expected x to be"."""

    holds: Callable[[Any], object]
    words: str


def bounds(*, lowest: int, below: int) -> FieldRule:
    return FieldRule(lambda value: lowest <= value < below, f"a whole number from {lowest} to {below - 1}")


def exactly(value: int) -> FieldRule:
    return FieldRule(lambda found: found == value, str(value))


def pattern(expression: str, words: str) -> FieldRule:
    """The whole text must match."""
    return FieldRule(re.compile(expression, re.ASCII).fullmatch, words)


Count = Annotated[int, bounds(lowest=0, below=10**12)]
Positive = Annotated[int, bounds(lowest=1, below=10**12)]


def decode(cls: type[T], data: object, *, what: str, exact: bool = True) -> T:
    """The dataclass `cls` from JSON: bytes, text, or a value that was parsed already.

    Its fields are bool, int, float, str, other dataclasses, `list[X]`, `tuple[X, ...]`, `dict[str,
    X]`, unions of these and None, or `Annotated[X, FieldRule]` of the first four. Numbers are
    finite and below 10**100, so that whatever is computed from them stays a number. A bool is not a
    number; an int may stand for a float. `field(metadata={"key": "from"})` reads the key `from`.

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
    read: Reader = _reader(cls, exact=exact)  # type: ignore[arg-type] # a class is hashable
    try:
        value: T = read(found)
    except _Mismatch as error:
        raise ValueError(f"expected {what}{error.path} {error.expected}, found {error.found}") from None
    return value


def encode(value: Any) -> Any:
    """The JSON value that `decode` reads back as `value`."""
    if is_dataclass(value):
        cls: Any = type(value)
        return {key: encode(getattr(value, each.name)) for key, each in _fields_by_key(cls).items()}
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    return {key: encode(each) for key, each in value.items()} if isinstance(value, dict) else value


def fits(value: object, kind: Any) -> bool:
    """Whether `decode` would accept `value` in a field of this type."""
    try:
        _reader(kind, exact=True)(value)
    except ValueError:
        return False
    return True


def finite(value: object) -> float | None:
    """The float that a JSON number stands for; None for what is no number, and for one beyond the
    largest float.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    with suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def parse_json(data: bytes | str) -> Any:
    """Raises ValueError for what is not JSON, and for what nests too deep to be read."""
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


class _Mismatch(ValueError):  # noqa: N818 - as in errors.py
    """What was expected and found at `path`, which grows on the way up to the whole value."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected, self.found, self.path = expected, found, ""


@cache
def _reader(kind: Any, exact: bool) -> Reader:
    """The function that reads a JSON value as `kind`, or raises _Mismatch.

    Built once for each type: a group of many nodes is read several times a second.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return _union_reader(arguments, exact)
    json_type, rule = arguments if origin is Annotated else (kind, None)
    read_inside: Reader | None = None
    if is_dataclass(kind):
        json_type, read_inside = dict, _object_reader(kind, exact)
    elif origin is dict:
        json_type, read_inside = dict, partial(_read_values, _reader(arguments[1], exact))
    elif origin in (list, tuple):
        json_type, read_inside = list, partial(_read_items, origin, _reader(arguments[0], exact))
    is_of_type = _IS_NUMBER.get(json_type, lambda value: type(value) is json_type)
    words = _words(kind)

    def read(value: Any) -> Any:
        if not is_of_type(value) or (rule is not None and not rule.holds(value)):
            raise _Mismatch(f"to be {words}", _SHORT.repr(value))
        return value if read_inside is None else read_inside(value)

    return read


def _read_items(kind: Any, read_item: Reader, found: list[Any]) -> Any:
    return kind(_read_at(f"[{index}]", read_item, item) for index, item in enumerate(found))


def _read_values(read_value: Reader, found: dict[str, Any]) -> Any:
    return {key: _read_at(f".{key:.80}", read_value, value) for key, value in found.items()}


def _read_at(step: str, read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except _Mismatch as error:
        error.path = step + error.path
        raise


def _object_reader(cls: Any, exact: bool) -> Reader:
    kinds, known = get_type_hints(cls, include_extras=True), _fields_by_key(cls)
    readers = [(key, each.name, _reader(kinds[each.name], exact)) for key, each in known.items()]
    needed = [key for key, each in known.items() if exact or each.default is each.default_factory is MISSING]

    def read(found: dict[str, Any]) -> Any:
        # Values first: a foreign `format` says more than a missing key.
        values = {
            name: _read_at(f".{key}", read_value, found[key])
            for key, name, read_value in readers
            if key in found
        }
        if absent := [key for key in needed if key not in found]:
            raise _Mismatch(f"to have {', '.join(known)}", f"no {absent[0]}")
        if exact and (others := [key for key in found if key not in known]):
            raise _Mismatch(f"to have no more than {', '.join(known)}", _SHORT.repr(others[0]))
        return cls(**values)

    return read


def _union_reader(kinds: tuple[Any, ...], exact: bool) -> Reader:
    others = [_reader(kind, exact) for kind in kinds if kind is not NoneType]
    words = " or ".join(map(_words, kinds))

    def read(value: Any) -> Any:
        if value is None and NoneType in kinds:
            return None
        if len(others) == 1:
            return others[0](value)  # which says more precisely what is wrong
        for read_value in others:
            with suppress(ValueError):
                return read_value(value)
        raise _Mismatch(f"to be {words}", _SHORT.repr(value))

    return read


@cache
def _fields_by_key(cls: Any) -> dict[str, Field[Any]]:
    return {each.metadata.get("key", each.name): each for each in fields(cls)}


def _words(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        rule: FieldRule = get_args(kind)[1]
        return rule.words
    return _WORDS.get(kind) or ("a list" if get_origin(kind) in (list, tuple) else "an object")
