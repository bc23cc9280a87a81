"""What is installed is imported here, before any worker exists; what is the user's own is never run here, only read.

It does not promise that everything was foreseen. `Preloaded.flaw` says whether workers forked from this process could see other modules than
workers that import everything themselves.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import site
import sys
import sysconfig
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.worker.find_imports import Elsewhere, Import, LocalModule, foresee, lies_in, strangers

# torch.optim's optimizers import torch._dynamo when the first is made, which takes longer than torch itself.
ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "torchvision")
OURS = "elastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preloaded:
    folder: Path  # the recipe's
    files: Mapping[str, str]  # of all modules, by name, without links
    strangers: tuple[str, ...]  # those that were imported here and are neither installed nor ours

    def flaw(self) -> str | None:
        """Why a worker's modules would not be those of a process that starts from nothing; None when they are."""
        if self.strangers:
            return f"an installed package imported {self.strangers[0]}, which is not installed and must be run anew by each worker"
        hidden = _hidden(self.folder, self.files)
        if hidden:
            return f"{self.folder / hidden[0]} has the name of an installed module that is imported already"
        return None


def preload(recipe: Path) -> Preloaded:
    """Import what every worker needs, then what the recipe's text and its local modules name."""
    folder = recipe.resolve().parent
    # Of what the interpreter, or the agent, had imported before, a file of the recipe's may hide behind the name; all else that it is, it is in every process.
    before = frozenset(sys.modules)
    first = sys.path[0]
    sys.path[0] = str(folder)  # as the worker will have it
    foreseen = foresee(recipe.read_bytes(), find)
    # A module of the user's that has the name of one that an installed package wants must not be run here.
    del sys.path[0]
    for wanted in [*(Import(module=name) for name in (*ALWAYS, *_own_modules())), *foreseen]:
        # What fails here fails in the worker too, which says so where a person looks, or catches it as it means to.
        with suppress(BaseException):
            _import(wanted)
    sys.path.insert(0, first)
    files = _files(sys.modules.keys() - {"__main__", "__mp_main__"})
    new = {name: file for name, file in files.items() if name not in before}
    installed = (*_installed_folders(), *_own_folders())
    return Preloaded(folder=folder, files=files, strangers=tuple(strangers(new, installed)))


def _import(wanted: Import) -> None:
    module = importlib.import_module(wanted.module)
    if wanted.name is not None and not hasattr(module, wanted.name):
        importlib.import_module(f"{wanted.module}.{wanted.name}")


def _own_modules() -> list[str]:
    import elastic

    folders = [Path(folder) for folder in elastic.__path__]
    return [
        f"{OURS}.{house}.{module.name}"
        for house in ("train", "worker")
        for module in pkgutil.iter_modules([str(folder / house) for folder in folders])
    ]


def find(name: str) -> LocalModule | Elsewhere:
    """Where a module is, without running any of it; what belongs to the interpreter or to this library counts as installed."""
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: a module without a spec, as __main__
        return Elsewhere.ABSENT
    if spec is not None and _is_installed(spec):
        return Elsewhere.INSTALLED
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return Elsewhere.ABSENT
        spec = importlib.machinery.PathFinder.find_spec(
            f"{spec.name}.{part}", spec.submodule_search_locations
        )
    return Elsewhere.ABSENT if spec is None else _local(spec)


def _is_installed(spec: importlib.machinery.ModuleSpec) -> bool:
    if spec.name == OURS or spec.origin in ("built-in", "frozen"):
        return True
    places = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or [])
    return bool(places) and all(lies_in(os.path.realpath(place), _installed_folders()) for place in places)


def _local(spec: importlib.machinery.ModuleSpec) -> LocalModule | Elsewhere:
    is_package = spec.submodule_search_locations is not None
    package = spec.name if is_package else spec.name.rpartition(".")[0]
    if spec.origin is None or not spec.origin.endswith(".py"):  # a namespace, or compiled
        return LocalModule(source=b"", package=package)
    try:
        return LocalModule(source=Path(spec.origin).read_bytes(), package=package)
    except OSError:
        return Elsewhere.ABSENT


def _installed_folders() -> tuple[str, ...]:
    """The interpreter's own folders and every folder that packages are installed into."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*(sysconfig.get_path(name) for name in names), *site.getsitepackages()]
    return tuple({os.path.realpath(folder) for folder in [*folders, site.getusersitepackages()]})


def _own_folders() -> tuple[str, ...]:
    import elastic

    return tuple(os.path.realpath(folder) for folder in elastic.__path__)


def _files(names: AbstractSet[str]) -> dict[str, str]:
    found = ((name, getattr(sys.modules.get(name), "__file__", None)) for name in names)
    # Made-up modules, as torch.ops, have made-up files, which are no paths.
    return {name: os.path.realpath(file) for name, file in found if isinstance(file, str) and os.sep in file}


def _hidden(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Files of the folder that a worker would import in the place of modules that are imported already."""
    importlib.invalidate_caches()
    beside = {entry.name.partition(".")[0] for entry in os.scandir(folder)} & files.keys()
    specs = (importlib.machinery.PathFinder.find_spec(name, [str(folder)]) for name in sorted(beside))
    return [
        Path(spec.origin).name
        for spec in specs
        if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) != files[spec.name]
    ]
