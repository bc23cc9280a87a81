"""An error of another process of this node is raised here as it was there: its class, words, stack.

It travels as plain values. What a pipe cannot carry whole, such as a class that a function defines
or an argument that is an object, is not taken, and its text is all that is left of it. A stack is
that of the other process below the frames of this one, as if this process had made the call.
"""

import sys
from dataclasses import dataclass
from traceback import extract_tb
from types import FrameType, FunctionType, TracebackType
from typing import Any, cast

_PLAIN = str, bytes, int, float, bool, type(None)
_MOST_BEHIND = 8  # errors that one was raised from, or while handling
_NOWHERE = -1  # in the line: columns of another code would be marked


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteError:
    """stack: file, line and function of each call, the outermost first. notes: add_note's.

    cause, context: the errors that it was raised from, and while handling.
    """

    kind: type[Exception]
    arguments: tuple[Any, ...]
    stack: tuple[tuple[str, int, str], ...]
    notes: tuple[str, ...]
    cause: "RemoteError | None"
    context: "RemoteError | None"
    suppress_context: bool

    @classmethod
    def of(cls, error: BaseException, behind: int = 0) -> "RemoteError | None":
        """None for an error that cannot be made again from plain values."""
        arguments, kind = _arguments(error), type(error)
        if arguments is None or not isinstance(error, Exception) or behind > _MOST_BEHIND:
            return None
        found = []
        for each in (error.__cause__, None if error.__cause__ is error.__context__ else error.__context__):
            found.append(None if each is None else cls.of(each, behind + 1))
            if each is not None and found[-1] is None:
                return None
        return cls(
            kind=kind,  # type: ignore[arg-type]  # of an Exception
            arguments=arguments,
            stack=tuple(
                (each.filename, each.lineno or 0, each.name) for each in extract_tb(error.__traceback__)
            ),
            notes=tuple(map(str, getattr(error, "__notes__", ()))),
            cause=found[0],
            context=found[1],
            suppress_context=error.__suppress_context__,
        )

    def again(self) -> Exception:
        """The error, for this process to raise."""
        error = self.kind(*self.arguments).with_traceback(_traceback(self.stack))
        for note in self.notes:
            error.add_note(note)
        error.__cause__ = None if self.cause is None else self.cause.again()
        error.__context__ = None if self.context is None else self.context.again()
        error.__suppress_context__ = self.suppress_context
        return error


def _arguments(error: BaseException) -> tuple[Any, ...] | None:
    """With which its class makes an equal error; None if that cannot be told."""
    kind = type(error)
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    try:
        made_by, arguments = cast("tuple[Any, ...]", error.__reduce__())[:2]
        is_equal = str(kind(*arguments)) == str(error)
    # A class of the recipe's may raise anything here, and its error would be lost.
    except Exception:
        return None
    is_plain = all(type(each) in _PLAIN for each in arguments)
    return tuple(arguments) if found is made_by is kind and is_equal and is_plain else None


def _traceback(stack: tuple[tuple[str, int, str], ...]) -> TracebackType | None:
    trace = None
    for file, line, function in reversed(stack):
        code = _frame.__code__.replace(co_filename=file, co_name=function, co_qualname=function)
        trace = TracebackType(trace, FunctionType(code, {"sys": sys})(), _NOWHERE, line)
    return trace


def _frame() -> FrameType:
    return sys._getframe()  # noqa: SLF001
