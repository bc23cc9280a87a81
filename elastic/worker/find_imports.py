"""The imports of a script are found by reading it and its local modules; none of them is executed.

Only statements that run when a module is imported count: what a function imports when it is called
is not found. An import that is missed costs each worker its time, and one too many costs the fork
server that time. Neither changes what the script sees.
"""

import ast
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import resolve_name
from pathlib import PurePath

MAX_LOCAL_MODULES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """`import module`, or `from module import name`, where `name` may be a submodule."""

    module: str
    name: str | None = None

    @property
    def modules(self) -> list[str]:
        """All modules that it may run: the enclosing packages, the module, and what it names."""
        parts = self.module.split(".")
        modules = [".".join(parts[: count + 1]) for count in range(len(parts))]
        return modules if self.name is None else [*modules, f"{self.module}.{self.name}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModule:
    """A module that is not installed. Relative imports in its text are relative to `package`."""

    source: bytes
    package: str


class NotLocal(Enum):
    INSTALLED = "installed"
    ABSENT = "absent"


Locate = Callable[[str], LocalModule | NotLocal]


def find_imports(source: bytes, locate: Locate) -> list[Import]:
    """The imports of installed modules that running `source` leads to, in about their order.

    `locate` tells where the module of a name is. Local modules are read in their turn, each once
    and at most MAX_LOCAL_MODULES of them.
    """
    found: dict[Import, None] = {}
    read: set[str] = set()
    left = deque(parse_imports(source, ""))
    while left:
        wanted = left.popleft()
        if locate(wanted.modules[0]) is NotLocal.INSTALLED:
            found[wanted] = None
            continue
        inner: list[Import] = []
        for name in wanted.modules:
            if name not in read and len(read) < MAX_LOCAL_MODULES:
                read.add(name)
                inner += _imports_of(locate(name))
        left.extendleft(reversed(inner))
    return list(found)


def _imports_of(module: LocalModule | NotLocal) -> list[Import]:
    return parse_imports(module.source, module.package) if isinstance(module, LocalModule) else []


def parse_imports(source: bytes, package: str) -> list[Import]:
    """What a module's own text imports when it runs.

    Text that is not Python imports nothing here; the worker raises the error.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [found for statement in _statements(tree.body) for found in _imports_in(statement, package)]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import: the body's own and those in its `if`, `try` and `with`."""
    for statement in body:
        yield statement
        match statement:
            case ast.If(test=test, body=inner, orelse=otherwise):
                yield from _statements([*([] if _is_skipped(test) else inner), *otherwise])
            case ast.Try() | ast.TryStar():
                caught = [inner for handler in statement.handlers for inner in handler.body]
                yield from _statements([*statement.body, *caught, *statement.orelse, *statement.finalbody])
            case ast.With(body=inner):
                yield from _statements(inner)
            case _:
                pass


def _is_skipped(test: ast.expr) -> bool:
    """Whether the test is false when a module is imported.

    `TYPE_CHECKING` is never true when code runs, and `__name__` is "__main__" in the script alone.
    """
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
        case ast.Compare(
            left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value="__main__")]
        ):
            return True
        case _:
            return False


def _imports_in(statement: ast.stmt, package: str) -> list[Import]:
    match statement:
        case ast.Import(names=names):
            return [Import(module=alias.name) for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            try:
                base = resolve_name("." * level + (module or ""), package)
            except ImportError:  # above the topmost package
                return []
            return [Import(module=base, name=None if a.name == "*" else a.name) for a in names]
        case _:
            return []


def modules_outside(files: Mapping[str, str], folders: Sequence[str]) -> list[str]:
    """The names of the modules whose file is inside none of the folders."""
    return [name for name, file in files.items() if not is_inside(file, folders)]


def is_inside(file: str, folders: Sequence[str]) -> bool:
    path = PurePath(file)
    return any(path.is_relative_to(folder) for folder in folders)
