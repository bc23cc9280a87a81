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

Not every import is found (find_imports.py). A worker imports the rest itself.
"""

import importlib
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePath

import elastic
from elastic.worker.find_imports import Import, LocalModule, find_imports

# torch.optim imports torch._dynamo when the first optimizer is made, which takes longer than torch
# itself. elastic.train.start leads to all that a worker needs of this library, except numpy.random,
# which numpy imports when it is first used.
ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "torchvision", "elastic.train.start", "numpy.random")


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
