"""Foreign data becomes a value of the expected type or a ValueError, and commands no terminal.

Foreign is what comes from the network, the storage, the run directory and the environment. A value
of the right type may still be a lie: access to those places decides who can write it.
"""

import json
import re
import reprlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

MOST_DIGITS = 18
LARGEST = 10**100

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
# repr of a foreign value could take for ever, or nest too deep.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


@dataclass(frozen=True, slots=True)
class Rule:
    """What `Annotated[type, rule]` asks of a value of that type; `words` end "expected x to be"."""

    holds: Callable[[Any], object]
    words: str


def bounds(*, lowest: int, below: int) -> Rule:
    return Rule(lambda value: lowest <= value < below, f"a whole number from {lowest} to {below - 1}")


def exactly(value: int) -> Rule:
    return Rule(lambda found: found == value, str(value))


def pattern(expression: str, words: str) -> Rule:
    """The whole text must match."""
    return Rule(re.compile(expression, re.ASCII).fullmatch, words)


Count = Annotated[int, bounds(lowest=0, below=10**12)]
Positive = Annotated[int, bounds(lowest=1, below=10**12)]


def decode(cls: type[T], data: object, *, what: str, exact: bool = True) -> T:
    """The dataclass `cls` from JSON: bytes, text, or a value that was parsed already.

    Its fields are bool, int, float, str, other dataclasses, `list[X]`, `tuple[X, ...]`,
    `dict[str, X]`, unions of these and None, or `Annotated[X, Rule]` of the first four. Numbers are
    finite and below 10**100, so that whatever is computed from them stays a number. A bool is not
    a number; an int may stand for a float. `field(metadata={"key": "from"})` reads the key `from`.

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
    value: T = _to_dataclass(found, cls, what, exact=exact)
    return value


def encode(value: Any) -> Any:
    """The JSON value that `decode` reads back as `value`."""
    if is_dataclass(value):
        cls: Any = type(value)
        return {key: encode(getattr(value, each.name)) for key, each in _fields(cls).items()}
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    return {key: encode(each) for key, each in value.items()} if isinstance(value, dict) else value


def fits(value: object, kind: Any) -> bool:
    """Whether `decode` would accept `value` in a field of this type."""
    try:
        _convert(value, kind, "", exact=True)
    except ValueError:
        return False
    return True


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


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    kind: Any
    has_default: bool


@cache
def _fields(cls: Any) -> dict[str, _Field]:
    """The fields of a dataclass, by their keys in the JSON."""
    kinds = get_type_hints(cls, include_extras=True)
    return {
        each.metadata.get("key", each.name): _Field(
            each.name, kinds[each.name], each.default is not MISSING or each.default_factory is not MISSING
        )
        for each in fields(cls)
    }


def _to_dataclass(found: object, cls: Any, where: str, *, exact: bool) -> Any:
    if not isinstance(found, dict):
        raise _wrong(where, "an object", found)
    known = _fields(cls)
    # Values first: where a file's `format` is not ours, that says more than a key that is missing.
    values = {
        each.name: _convert(found[key], each.kind, f"{where}.{key}", exact=exact)
        for key, each in known.items()
        if key in found
    }
    absent = [key for key, each in known.items() if key not in found and (exact or not each.has_default)]
    if absent:
        raise ValueError(f"expected {where} to have {', '.join(known)}, found no {absent[0]}")
    if exact and (others := [key for key in found if key not in known]):
        raise ValueError(
            f"expected {where} to have no more than {', '.join(known)}, found {_SHORT.repr(others[0])}"
        )
    return cls(**values)


def _convert(value: Any, kind: Any, where: str, *, exact: bool) -> Any:
    if is_dataclass(kind):
        return _to_dataclass(value, kind, where, exact=exact)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return _to_one_of(value, arguments, where, exact=exact)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        return origin(
            _convert(each, arguments[0], f"{where}[{i}]", exact=exact) for i, each in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        return {
            key: _convert(each, arguments[1], f"{where}.{key:.80}", exact=exact)
            for key, each in value.items()
        }
    scalar, rule = arguments if origin is Annotated else (kind, None)
    if not _is_scalar(value, scalar) or (rule is not None and not rule.holds(value)):
        raise _wrong(where, _words(kind), value)
    return value


def _to_one_of(value: Any, kinds: tuple[Any, ...], where: str, *, exact: bool) -> Any:
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) == 1:
        return _convert(value, others[0], where, exact=exact)
    for kind in others:
        with suppress(ValueError):
            return _convert(value, kind, where, exact=exact)
    raise _wrong(where, " or ".join(map(_words, kinds)), value)


def _is_scalar(value: Any, kind: Any) -> bool:
    if kind is int:
        return type(value) is int and abs(value) < LARGEST
    if kind is float:
        return type(value) in (int, float) and abs(value) < LARGEST  # false for NaN as well
    return type(value) is kind


def _words(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        rule: Rule = get_args(kind)[1]
        return rule.words
    return _WORDS.get(kind) or ("a list" if get_origin(kind) in (list, tuple) else "an object")


def _wrong(where: str, expected: str, found: object) -> ValueError:
    return ValueError(f"expected {where} to be {expected}, found {_SHORT.repr(found)}")
