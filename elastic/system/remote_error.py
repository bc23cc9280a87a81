"""An error of another process of this node is raised here as it was there: its class, words, stack.

It travels as plain values: numbers, text, and containers of these. Its attributes do where they are
such. Of an error that cannot be made again from plain values (its class is one that a function
defines, an argument is an object, it is a group of errors), a RuntimeError is raised whose words
are its whole traceback. A stack is that of the other process below the frames of this one, as if
this process had made the call.
"""

import sys
from dataclasses import dataclass
from traceback import extract_tb, format_exception
from types import FrameType, FunctionType, TracebackType
from typing import Any, cast

_PLAIN = str, bytes, int, float, bool, type(None)
_CONTAINERS = tuple, list, dict
_MOST_BEHIND = 8  # errors that one was raised from, or while handling
_NOWHERE = -1  # in the line: columns of another code would be marked

_Parts = tuple[type[Exception], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteError:
    """attributes: those of plain values, which the class need not set from its arguments.

    stack: file, line and function of each call, the outermost first. notes: add_note's.
    cause, context: the errors that it was raised from, and while handling.
    """

    kind: type[Exception]
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]
    stack: tuple[tuple[str, int, str], ...]
    notes: tuple[str, ...]
    cause: "RemoteError | None"
    context: "RemoteError | None"
    suppress_context: bool

    @classmethod
    def of(cls, error: BaseException, behind: int = 0) -> "RemoteError":
        """behind: how many errors were raised from this one, or while handling it."""
        made = _parts(error) if behind <= _MOST_BEHIND else None
        cause, context = error.__cause__, error.__context__
        if made is None:  # the text has these as well
            made, cause, context = (RuntimeError, ("".join(format_exception(error)),), {}), None, None
        kind, arguments, attributes = made
        return cls(
            kind=kind,
            arguments=arguments,
            attributes=attributes,
            stack=tuple(
                (each.filename, each.lineno or 0, each.name) for each in extract_tb(error.__traceback__)
            ),
            notes=tuple(map(str, getattr(error, "__notes__", ()))) if kind is type(error) else (),
            cause=None if cause is None else cls.of(cause, behind + 1),
            context=None if context is None or context is cause else cls.of(context, behind + 1),
            suppress_context=error.__suppress_context__,
        )

    def again(self) -> Exception:
        """The error, for this process to raise."""
        error = _made(self.kind, self.arguments, self.attributes).with_traceback(_traceback(self.stack))
        for note in self.notes:
            error.add_note(note)
        error.__cause__ = None if self.cause is None else self.cause.again()
        error.__context__ = None if self.context is None else self.context.again()
        error.__suppress_context__ = self.suppress_context
        return error


def _parts(error: BaseException) -> _Parts | None:
    """Of what an equal error is made; None if that cannot be told."""
    kind = type(error)
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is not kind or not isinstance(error, Exception):
        return None
    try:
        made_by, arguments, *state = cast("tuple[Any, ...]", error.__reduce__())
        held = {**vars(error), **(state[0] if state and isinstance(state[0], dict) else {})}
        attributes = {name: each for name, each in held.items() if name != "__notes__" and _is_plain(each)}
        is_equal = str(_made(kind, arguments, attributes)) == str(error) and _is_plain(arguments)
    # A class of the recipe's may raise anything here, and its error would be lost.
    except Exception:
        return None
    return (kind, arguments, attributes) if made_by is kind and is_equal else None


def _made(kind: type[Exception], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind(*arguments)
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def _is_plain(value: Any) -> bool:
    match value:
        case tuple() | list() | dict() if type(value) in _CONTAINERS:
            parts = (*value, *value.values()) if isinstance(value, dict) else value
            return all(map(_is_plain, parts))
        case _:
            return type(value) in _PLAIN


def _traceback(stack: tuple[tuple[str, int, str], ...]) -> TracebackType | None:
    trace = None
    for file, line, function in reversed(stack):
        code = _frame().f_code.replace(co_filename=file, co_name=function, co_qualname=function)
        trace = TracebackType(trace, FunctionType(code, {"sys": sys})(), _NOWHERE, line)
    return trace


def _frame() -> FrameType:
    return sys._getframe()  # noqa: SLF001
