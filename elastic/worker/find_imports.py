"""The imports of a script are found by reading it and its local modules; none of them is executed.

Only statements that run when a module is imported count: what a function imports when it is called
is not found. An import that is missed costs each worker its time, and one too many costs the fork
server that time. Neither changes what the script sees: import_watch.py sees to that.
"""

import ast
import re
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import resolve_name
from itertools import accumulate

MAX_LOCAL_MODULES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """`import module`, or `from module import name`, where `name` may be a submodule."""

    module: str
    name: str | None = None

    @property
    def modules(self) -> list[str]:
        """All modules that it may run: the enclosing packages, the module, and what it names."""
        modules = [*accumulate(self.module.split("."), "{}.{}".format)]
        return modules if self.name is None else [*modules, f"{self.module}.{self.name}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModule:
    """A module that is not installed; without text where there is none, or none to read.

    Relative imports in its text are relative to `package`.
    """

    source: bytes = b""
    package: str = ""


def find_imports(source: bytes, locate: Callable[[str], LocalModule | None]) -> list[Import]:
    """The imports of installed modules that running `source` leads to, in about their order.

    `locate` finds the module of a name, and returns None if it is installed. Local modules are read
    in their turn, each once and at most MAX_LOCAL_MODULES of them.
    """
    found: dict[Import, None] = {}
    read: set[str] = set()
    left = deque(parse_imports(source, ""))
    while left:
        wanted = left.popleft()
        if locate(wanted.modules[0]) is None:
            found[wanted] = None
            continue
        inner: list[Import] = []
        for name in wanted.modules:
            if name not in read and len(read) < MAX_LOCAL_MODULES and (module := locate(name)) is not None:
                read.add(name)
                inner += parse_imports(module.source, module.package)
        left.extendleft(reversed(inner))
    return list(found)


def parse_imports(source: bytes, package: str) -> list[Import]:
    """What a module's own text imports when it runs.

    Text that is not Python imports nothing here; the worker raises the error.
    """
    try:
        left: deque[ast.AST] = deque(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[Import] = []
    while left:
        statement = left.popleft()
        inner: Iterable[ast.AST] = ()
        match statement:
            case ast.Import(names=names):
                found += [Import(module=alias.name) for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                with suppress(ImportError):  # above the topmost package
                    base = resolve_name("." * level + (module or ""), package)
                    found += [Import(module=base, name=None if a.name == "*" else a.name) for a in names]
            case ast.If(test=test, orelse=otherwise) if _is_skipped(test):
                inner = otherwise
            case ast.If() | ast.Try() | ast.TryStar() | ast.With() | ast.ExceptHandler():
                inner = ast.iter_child_nodes(statement)
            case _:
                pass
        left.extendleft(reversed([*inner]))
    return found


def _is_skipped(test: ast.expr) -> bool:
    """Whether the test is false when a module is imported.

    `TYPE_CHECKING` is never true when code runs, and `__name__` is "__main__" in the script alone.
    """
    return bool(re.fullmatch(r"([\w.]+\.)?TYPE_CHECKING|__name__ == '__main__'", ast.unparse(test)))
