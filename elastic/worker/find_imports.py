"""What a script will import is known before it runs: its text and that of the local modules it imports are read, none of it is executed.

Only statements that run when a module is imported count; what a function imports when it is called is not foreseen. To foresee too little costs
the worker the time of an import, and to foresee too much costs the warm parent that time; neither changes what the script sees.
"""

import ast
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath

MOST_LOCAL_MODULES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """`import module`, or `from module import name`, where the name may be a submodule or anything else."""

    module: str
    name: str | None = None

    @property
    def modules(self) -> list[str]:
        """Every module that it may run: the packages on the way first, then itself, then what it names."""
        parts = self.module.split(".")
        way = [".".join(parts[: count + 1]) for count in range(len(parts))]
        return way if self.name is None else [*way, f"{self.module}.{self.name}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModule:
    """A module that is not installed; relative imports in its text are relative to `package`."""

    source: bytes
    package: str


class Elsewhere(Enum):
    INSTALLED = "installed"
    ABSENT = "absent"


Find = Callable[[str], LocalModule | Elsewhere]


def foresee(source: bytes, find: Find) -> list[Import]:
    """The imports of installed modules that running `source` leads to, in about the order in which it would do them.

    `find` says where a module is. Local ones are read in their turn, each once and at most MOST_LOCAL_MODULES of them.
    """
    foreseen: dict[Import, None] = {}
    read: set[str] = set()
    left = deque(imports(source, ""))
    while left:
        wanted = left.popleft()
        if find(wanted.modules[0]) is Elsewhere.INSTALLED:
            foreseen[wanted] = None
            continue
        inner: list[Import] = []
        for name in wanted.modules:
            if name not in read and len(read) < MOST_LOCAL_MODULES:
                read.add(name)
                inner += _imports_of(find(name))
        left.extendleft(reversed(inner))
    return list(foreseen)


def _imports_of(module: LocalModule | Elsewhere) -> list[Import]:
    return imports(module.source, module.package) if isinstance(module, LocalModule) else []


def imports(source: bytes, package: str) -> list[Import]:
    """What the module's own text imports when it is imported; nothing where it is not Python, which the worker will say."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [found for statement in _statements(tree.body) for found in _read(statement, package)]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """All that runs at import: the body itself and what stands in its `if`, `try` and `with`."""
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
    """`TYPE_CHECKING` is never true; what `__name__ == "__main__"` guards is a program's beginning, not a module's needs."""
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
        case ast.Compare(
            left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value="__main__")]
        ):
            return True
        case _:
            return False


def _read(statement: ast.stmt, package: str) -> list[Import]:
    match statement:
        case ast.Import(names=names):
            return [Import(module=alias.name) for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            base = _absolute(module or "", level, package)
            if not base:
                return []
            return [Import(module=base, name=None if a.name == "*" else a.name) for a in names]
        case _:
            return []


def _absolute(module: str, level: int, package: str) -> str:
    """The module's full name; empty where it would lie above the topmost package."""
    if level == 0:
        return module
    parts = package.split(".") if package else []
    if level > len(parts):
        return ""
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def strangers(files: Mapping[str, str], folders: Sequence[str]) -> list[str]:
    """The modules, by name, whose file lies in none of the folders."""
    return [name for name, file in files.items() if not lies_in(file, folders)]


def lies_in(file: str, folders: Sequence[str]) -> bool:
    path = PurePath(file)
    return any(path.is_relative_to(folder) for folder in folders)
