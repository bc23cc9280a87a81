"""The fork server imports installed modules for its workers, and never runs a module of the user's.

The difference decides what a worker may inherit. An installed module is the same for every worker
and stays the same until the agent notices a new installation and replaces the fork server. A module
of the user's is read here only for its imports: it is run by each worker, under that worker's
environment and as it is on the disk at that time.

That does not make all imports safe. An installed package may import a module by a name that a file
of the user's also has, and Python keeps one module for each name. So after the imports two things
are checked: no module was loaded from outside the installed folders, and no file beside the recipe
has the name of a module that is loaded. `Preloaded.conflict` has the answer; with a conflict no
worker is forked.

The imports are found by reading the script and its local modules. Only statements that run when a
module is imported count: what a function imports when it is called is not found. An import that is
missed costs each worker its time, and one too many costs the fork server that time. Neither changes
what the script sees.
"""

import ast
import importlib
import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from itertools import accumulate
from pathlib import Path, PurePath

import elastic

# torch.optim imports torch._dynamo when the first optimizer is made, which takes longer than torch
# itself. elastic.train.start leads to all that a worker needs of this library, except numpy.random,
# which numpy imports when it is first used.
ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "torchvision", "elastic.train.start", "numpy.random")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Preloaded:
    folder: Path  # the recipe's
    files: Mapping[str, str]  # of all loaded modules, by name, with symbolic links resolved
    uninstalled: tuple[str, ...]  # modules that were loaded here and are neither installed nor this library's

    def conflict(self) -> str | None:
        """Why a forked worker would see other modules than a spawned one; None if it would not."""
        if self.uninstalled:
            return f"an installed package imported {self.uninstalled[0]}, which is not installed and must be run by each worker itself"
        # A spawned worker would import a file of the recipe's folder instead of a module of its
        # name that is loaded here.
        origin = self.hides(self.folder)
        return (
            None
            if origin is None
            else f"{origin} has the name of an installed module that is imported already"
        )

    def hides(self, folder: Path) -> str | None:
        """A file in this folder that has the name of a module which is loaded; None for none."""
        importlib.invalidate_caches()
        if not folder.is_dir():
            return None
        for name in sorted({path.name.partition(".")[0] for path in folder.iterdir()} & self.files.keys()):
            spec = PathFinder.find_spec(name, [str(folder)])
            origin = None if spec is None else spec.origin
            if origin is not None and os.path.realpath(origin) != self.files[name]:
                return origin
        return None


def preload(recipe: Path) -> Preloaded:
    """Import what every worker needs, and what the recipe and its local modules import."""
    folder = recipe.resolve().parent
    # Modules imported before this point are the same in every process, because the interpreter or
    # the agent imported them. The only risk they carry is a file beside the recipe with the same
    # name, which `conflict` looks for. So `uninstalled` below counts only the modules that are
    # loaded here.
    before = frozenset(sys.modules)
    own = [] if sys.flags.safe_path else [sys.path[0]]  # of the program that this process began as
    # A worker has the recipe's folder there, so the search for local modules needs it too. The
    # imports must not have it: with the folder on the path, an installed package that imports a
    # common name, `utils` for example, would run the user's module of that name in this process.
    sys.path[: len(own)] = [str(folder)]
    found = find_imports(recipe.read_bytes(), locate)
    del sys.path[0]
    for wanted in [*(Import(module=name) for name in ALWAYS), *found]:
        # An import that fails here fails in the worker too. There its traceback is in the worker's
        # log, or the recipe catches it, as it would for an optional package.
        with suppress(BaseException):
            _import(wanted)
    sys.path[:0] = own
    names = sys.modules.keys() - {"__main__", "__mp_main__"}
    places = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    # Modules that were made by code, such as torch.ops, have a `__file__` that is no path.
    files = {
        name: os.path.realpath(file)
        for name, file in places.items()
        if isinstance(file, str) and os.sep in file
    }
    installed = [*installed_folders(), *map(os.path.realpath, elastic.__path__)]
    uninstalled = [name for name in files if name not in before and not is_inside(files[name], installed)]
    return Preloaded(folder=folder, files=files, uninstalled=tuple(uninstalled))


def _import(wanted: Import) -> None:
    module = importlib.import_module(wanted.module)
    if wanted.name is not None and not hasattr(module, wanted.name):
        importlib.import_module(f"{wanted.module}.{wanted.name}")


def locate(name: str) -> LocalModule | None:
    """Find a module without running it, nor the packages around it; None if it is installed.

    Modules of the interpreter and of this library count as installed.
    """
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: a module without a spec, such as __main__
        return LocalModule()
    if spec is not None and _is_installed(spec):
        return None
    for part in inner:
        spec = spec and PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations or [])
    if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
        with suppress(OSError):
            return LocalModule(source=Path(spec.origin).read_bytes(), package=spec.parent or "")
    return LocalModule()  # absent, a namespace, or compiled


def _is_installed(spec: ModuleSpec) -> bool:
    if spec.name == "elastic" or spec.origin in ("built-in", "frozen"):
        return True
    places = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or [])
    return bool(places) and all(is_inside(os.path.realpath(place), installed_folders()) for place in places)


def installed_folders() -> set[str]:
    """The interpreter's own folders and every folder that packages are installed into."""
    own = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return set(map(os.path.realpath, [*own, *site.getsitepackages(), site.getusersitepackages()]))


def is_inside(file: str, folders: Iterable[str]) -> bool:
    path = PurePath(file)
    return any(path.is_relative_to(folder) for folder in folders)


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
