"""The fork server imports installed modules for its workers, and never runs a module of the user's.

The difference decides what a worker may inherit. An installed module is the same for every worker
as long as the command runs. A module of the user's is run by each worker, under that worker's
environment and as it is on the disk at that time.

That does not make all imports safe. An installed package may import a module by a name that a file
of the user's also has, and Python keeps one module for each name. So after the imports two things
are checked: no module was loaded from outside the installed folders, and no file beside the recipe
has the name of a module that is loaded. `Preloaded.conflict` has the answer; with a conflict no
worker is forked. And a recipe may change a variable, or `sys.path`, before it imports a module:
plain python runs the module under the change, and a forked process has it already. `elastic.start`
compares both with what they were (`tell`). A preflight that finds a change has the agent spawn all
workers, which inherit nothing. That does not help where the change came after the import. A worker
that finds one where the preflight found none says so. Neither process sees finders, nor
a recipe's stand-ins in `sys.modules`.

What the recipe imports is known from its text, as far as it names installed modules outside
functions and branches, and then from its preflight, which has run it up to `elastic.start`. A
module that it imports later costs each worker its time, and changes nothing that the script sees.
"""

import importlib
import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import elastic
from elastic.config import environment

# torch.optim imports torch._dynamo when the first optimizer is made, which takes longer than torch
# itself. elastic.train.start leads to all that a worker needs of this library, except numpy.random,
# which numpy imports when it is first used.
ALWAYS = ("torch", "torch.distributed", "torch._dynamo", "torchvision", "elastic.train.start", "numpy.random")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preloaded:
    files: Mapping[str, str]  # of all loaded modules, by name
    uninstalled: tuple[str, ...]  # modules that were loaded here and are neither installed nor this library's

    def conflict(self, folder: Path) -> str | None:
        """Why a forked worker would see other modules than a spawned one; None if it would not.

        folder: the recipe's.
        """
        if self.uninstalled:
            return f"an installed package imported {self.uninstalled[0]}, which is not installed and must be run by each worker itself"
        # A spawned worker would import a file of the recipe's folder instead of a module of its
        # name that is loaded here.
        origin = self.hides(folder)
        return origin and f"{origin} has the name of an installed module that is imported already"

    def hides(self, folder: Path) -> str | None:
        """A file in this folder that has the name of a module which is loaded; None for none."""
        importlib.invalidate_caches()
        names: set[str] = set()
        with suppress(OSError):  # Python finds nothing there either
            names = {path.name.partition(".")[0] for path in folder.iterdir()}
        for name in sorted(names & self.files.keys()):
            spec = PathFinder.find_spec(name, [str(folder)])
            origin = None if spec is None else spec.origin
            if origin is not None and os.path.realpath(origin) != os.path.realpath(self.files[name]):
                return origin
        return None


def preload(modules: Sequence[str], earlier: Preloaded | None) -> Preloaded:
    """Import what every worker needs, and these modules. earlier: the result of a call before."""
    # Modules imported before this point are the same in every process, because the interpreter or
    # the agent imported them. The only risk they carry is a file beside the recipe with the same
    # name, which `conflict` looks for. So `uninstalled` below counts only the modules that are
    # loaded here.
    before = frozenset(sys.modules)
    # The folder of the program that this process began as. With it on the path, an installed
    # package that imports a common name, `utils` for example, would run the user's module of it.
    own = [] if sys.flags.safe_path else [sys.path.pop(0)]
    for module in (*ALWAYS, *modules):
        # An import that fails here fails in the worker too. There its traceback is in the worker's
        # log, or the recipe catches it, as it would for an optional package.
        with suppress(BaseException):
            importlib.import_module(module)
    sys.path[:0] = own
    # torch 2.14 looks through all installed packages for a gloo before it takes its own: 11 ms.
    with suppress(Exception):
        sys.modules["torch.distributed.distributed_c10d"]._register_builtin_gloo_backend()  # noqa: SLF001
    files = loaded_files()
    uninstalled = [name for name, file in files.items() if name not in before and not is_installed(file)]
    return Preloaded(files=files, uninstalled=(*(earlier.uninstalled if earlier else ()), *uninstalled))


def loaded_files() -> dict[str, str]:
    """The files of all loaded modules, by name, in about the order of their imports."""
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    # Modules that were made by code, such as torch.ops, have a `__file__` that is no path.
    return {
        name: file
        for name, file in files.items()
        if isinstance(file, str) and os.sep in file and name not in ("__main__", "__mp_main__")
    }


def is_installed(file: str) -> bool:
    """Whether it lies in the interpreter's own folders, where packages are installed, or in this
    library.
    """
    return file.startswith(_INSTALLED) or os.path.realpath(file).startswith(_INSTALLED)


def _installed_folders() -> tuple[str, ...]:
    own = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    folders = [*own, *site.getsitepackages(), site.getusersitepackages(), *elastic.__path__]
    return tuple(f"{folder}/" for given in folders for folder in (given, os.path.realpath(given)))


_INSTALLED = _installed_folders()

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


def changed() -> str:
    """What has changed since the first line of the recipe, as a clause; empty for nothing."""
    if not _begun:
        return ""
    (began,) = _begun
    before, now = began.variables, environment.variables()
    if names := [name for name in before | now if before.get(name) != now.get(name)]:
        return f"{', '.join(names)} changed before elastic.start; set it in the environment of the command"
    for folder in sys.path:
        if folder not in began.path and (origin := began.preloaded.hides(Path(folder))):
            return f"the recipe adds {folder} to sys.path, and {origin} has the name of an installed module"
    return ""


def tell(launch: environment.Launch) -> None:
    """At elastic.start."""
    found = changed()
    if launch.preflight is not None:
        answer = Path(launch.preflight)
        if found:
            answer.with_suffix(environment.SPAWN).write_text(found)
        if _begun:
            inherited = _begun[0].preloaded.files
            modules = [n for n, file in loaded_files().items() if n not in inherited and is_installed(file)]
            answer.with_suffix(environment.MODULES).write_text("\n".join(modules))
    elif found:
        print(f"this worker was forked before, and a spawned one could differ: {found}", file=sys.stderr)
