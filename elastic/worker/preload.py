"""The fork server imports installed modules for its workers, and never runs a module of the user's.

The difference decides what a worker may inherit. An installed module is the same for every worker
as long as the command runs. A module of the user's is read here only for its imports: it is run by
each worker, under that worker's environment and as it is on the disk at that time.

That does not make all imports safe. An installed package may import a module by a name that a file
of the user's also has, and Python keeps one module for each name. So after the imports two things
are checked: no module was loaded from outside the installed folders, and no file beside the recipe
has the name of a module that is loaded. `Preloaded.conflict` has the answer; with a conflict no
worker is forked. And a recipe may change a variable, or put a folder in front of an inherited
module, after plain python would have run the module under the change: `elastic.start` compares once
(`tell`). A preflight that finds a change has the agent spawn all workers, which inherit nothing. A
worker that finds one where the preflight found none says so. It does not know whether the change
came before the import: then the workers are spawned in vain. It does not see finders, or stand-ins
that a recipe puts into `sys.modules`.

The imports are found by reading the script and its local modules. Only statements that run when a
module is imported count: what a function imports when it is called is not found. An import that is
missed costs each worker its time, and one too many costs the fork server that time. Neither changes
what the script sees.
"""

import ast
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path, PurePath

import elastic
from elastic.config import environment

# torch.optim imports torch._dynamo when the first optimizer is made, which takes longer than torch
# itself. elastic.train.start leads to all that a worker needs of this library, except numpy.random,
# which numpy imports when it is first used.
ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "torchvision", "elastic.train.start", "numpy.random")
MOST_FILES = 5000  # that are looked for; most of them are not there

Import = tuple[str, str]  # `import module`, with no name, or `from module import name`


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
        return origin and f"{origin} has the name of an installed module that is imported already"

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
    recipe = recipe.resolve()
    recipe.read_bytes()  # the reason of a recipe that cannot be read is shown
    # Modules imported before this point are the same in every process, because the interpreter or
    # the agent imported them. The only risk they carry is a file beside the recipe with the same
    # name, which `conflict` looks for. So `uninstalled` below counts only the modules that are
    # loaded here.
    before = frozenset(sys.modules)
    own = [] if sys.flags.safe_path else [sys.path[0]]  # of the program that this process began as
    # A worker has the recipe's folder there, so the search for local modules needs it too. The
    # imports must not have it: with the folder on the path, an installed package that imports a
    # common name, `utils` for example, would run the user's module of that name in this process.
    sys.path[: len(own)] = [str(recipe.parent)]
    found = find_imports(recipe)
    del sys.path[0]
    for module, name in [*((module, "") for module in ALWAYS), *found]:
        # An import that fails here fails in the worker too. There its traceback is in the worker's
        # log, or the recipe catches it, as it would for an optional package.
        with suppress(BaseException):
            imported = importlib.import_module(module)
            if name and not hasattr(imported, name):
                importlib.import_module(f"{module}.{name}")
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
    return Preloaded(folder=recipe.parent, files=files, uninstalled=tuple(uninstalled))


def find_imports(recipe: Path) -> list[Import]:
    """The imports of installed modules that running the recipe leads to, in about their order.

    Local modules are looked for on sys.path, and read in their turn, each once.
    """
    found: dict[Import, None] = {}
    read: set[Path] = set()
    left = deque([recipe])
    while left and len(read) < MOST_FILES:
        file = left.popleft()
        if file in read:
            continue
        read.add(file)
        inner: list[Path] = []
        for level, module, name in _imports_of(file):
            parts = [part for part in (*module.split("."), name) if part]
            if level:
                inner += _files_below(file.parents[min(level, len(file.parents)) - 1], parts)
            elif (folders := _local_folders(parts[0])) is None:
                found[module, name] = None
            else:
                inner += [each for folder in folders for each in _files_below(folder, parts)]
        left.extendleft(reversed(inner))
    return list(found)


def _imports_of(file: Path) -> Iterator[tuple[int, str, str]]:
    """The level, module and name of each import that running the file runs; level 0 is absolute.

    A file that is missing or not Python imports nothing here; the worker raises the error.
    """
    try:
        left: deque[ast.AST] = deque(ast.parse(file.read_bytes()).body)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    while left:
        inner: Iterable[ast.AST] = ()
        match left.popleft():
            case ast.Import(names=names):
                yield from ((0, alias.name, "") for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from ((level, module or "", alias.name.strip("*")) for alias in names)
            case ast.If(test=test, orelse=otherwise) if "TYPE_CHECKING" in ast.unparse(test):
                inner = otherwise
            case (ast.If() | ast.Try() | ast.TryStar() | ast.With() | ast.ExceptHandler()) as statement:
                inner = ast.iter_child_nodes(statement)
            case _:
                pass
        left.extendleft(reversed([*inner]))


def _files_below(folder: Path, parts: Sequence[str]) -> list[Path]:
    """Where the files are that an import of the parts' module runs, with the packages around it."""
    places = [folder.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    return [each for place in places for each in (place.with_suffix(".py"), place / "__init__.py")]


def _local_folders(name: str) -> list[Path] | None:
    """The folders in which a module or package of this name lies; None if it is installed.

    Modules of the interpreter and of this library count as installed.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module without a spec, such as __main__
        return []
    if spec is None:
        return []
    places = list(spec.submodule_search_locations or filter(None, [spec.origin]))
    is_installed = places and all(is_inside(os.path.realpath(place), installed_folders()) for place in places)
    if is_installed or name == "elastic" or spec.origin in ("built-in", "frozen"):
        return None
    return [Path(place).parent for place in places]


def installed_folders() -> set[str]:
    """The interpreter's own folders and every folder that packages are installed into."""
    own = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return set(map(os.path.realpath, [*own, *site.getsitepackages(), site.getusersitepackages()]))


def is_inside(file: str, folders: Iterable[str]) -> bool:
    path = PurePath(file)
    return any(path.is_relative_to(folder) for folder in folders)


# What the recipe does to what it has inherited.


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What a forked process began with."""

    preloaded: Preloaded
    variables: dict[str, str]
    path: tuple[str, ...]


_begun: list[Inherited] = []  # of this process; empty if it was spawned


def begin(preloaded: Preloaded) -> None:
    _begun[:] = [Inherited(preloaded=preloaded, variables=environment.variables(), path=tuple(sys.path))]


def change() -> str:
    """What has changed since the first line of the recipe, as a clause; empty for nothing."""
    for began in _begun:
        before, now = began.variables, environment.variables()
        if names := [name for name in before | now if before.get(name) != now.get(name)]:
            return (
                f"{', '.join(names)} changed before elastic.start; set it in the environment of the command"
            )
        for folder in sys.path:
            if folder not in began.path and (origin := began.preloaded.hides(Path(folder))):
                return (
                    f"the recipe adds {folder} to sys.path, and {origin} has the name of an installed module"
                )
    return ""


def tell(launch: environment.Launch) -> None:
    """At elastic.start."""
    if not (found := change()):
        return
    if launch.preflight is not None:
        Path(launch.preflight).with_suffix(environment.SPAWN).write_text(found)
    else:
        print(f"this worker was forked before: {found}, and all workers are spawned", file=sys.stderr)
