"""A setting that a recipe makes before an import reaches that import, in forked workers too.

A forked worker has inherited modules from the fork server, which imported them under other
settings. So the worker watches the imports of its recipe up to `elastic.start`. If the recipe has
changed a variable, `sys.path`, a finder or `sys.modules` when an inherited module is imported for
the first time, then plain python would have run that module under the change. The worker then
begins again as a new interpreter, which inherits nothing: the lines up to that import run twice.

The fork server noted which modules each import brought with it. A module that came with an earlier
import of the recipe's is there under plain python as well. Modules of the standard library count as
independent of settings, and those of this library read none when they are imported.

It does not see settings that are made after `elastic.start` (in a script without this library:
after the import of torch), nor what C code sets. What an installed package sets while it is
imported is no setting of the recipe's: the fork server's imports set it, or not, all the same.
"""

import builtins
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from itertools import accumulate
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from elastic.config.environment import VariableWatch
from elastic.worker.preload import installed_folders, is_inside

# torch imports its compiler when the first optimizer is made, which is later than elastic.start.
# Settings of the compiler begin with these letters.
LAZY, LAZY_SETTINGS = "torch._dynamo", ("TORCH", "PYTORCH", "TRITON", "INDUCTOR")

INDEPENDENT = sys.stdlib_module_names | {"elastic"}
_watches: list["ImportWatch"] = []  # the one of this process, from its start until it has finished


class ImportWatch:
    """brought: which modules each import of the fork server's loaded, by its name. begin_again: is
    given a reason, and ends this interpreter. is_recipe: elastic.start will be called. In another
    script the import of torch ends the watch, because the script may train from there on.
    """

    def __init__(
        self,
        brought: Mapping[str, Sequence[str]],
        begin_again: Callable[[str], None],
        *,
        is_recipe: bool = True,
    ) -> None:
        self._brought = brought
        self._is_recipe = is_recipe
        self._begin_again = begin_again
        self._inherited: dict[str, ModuleType | None] = {}
        self._seen: set[str] = set()  # inherited modules that plain python would have loaded by now
        self._pid = os.getpid()
        self._variables = VariableWatch(lambda: not self._imports_library())
        self._originals = builtins.__import__, importlib.import_module

    def start(self) -> None:
        self._inherited = {name: module for name, module in sys.modules.items() if name != "__main__"}
        self._path = [*dict.fromkeys(sys.path)]
        self._finders = [*sys.meta_path, *sys.path_hooks]
        # `pip install --target` leaves its records in a folder, and the first one is the recipe's.
        targets = [entry for entry in self._path[1:] if any(Path(entry).glob("*.dist-info"))]
        self._libraries = {*installed_folders(), *map(os.path.realpath, targets)}
        self._variables.start()
        _watches.append(self)
        builtins.__import__ = self._import
        importlib.import_module = self._import_module

    def finish(self) -> None:
        """Watch no longer.

        What this library imports from here on depends on no setting, except for torch.
        """
        if "torch" not in self._seen:
            self._look_at(["torch"], "elastic.start")
        elif LAZY not in self._seen and any(
            name.startswith(LAZY_SETTINGS) for name in self._variables.changed
        ):
            self._look_at([LAZY], "elastic.start")
        self._stop()

    def _stop(self) -> None:
        if builtins.__import__ == self._import:  # and no other code has replaced it meanwhile
            builtins.__import__ = self._originals[0]
        if importlib.import_module == self._import_module:
            importlib.import_module = self._originals[1]
        self._variables.stop()
        _watches.remove(self)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 - the names of the function that it replaces
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        package = str((globals or {}).get("__package__") or "")
        self._see("." * level + name, package, fromlist or ())
        return self._originals[0](name, globals, locals, fromlist, level)

    def _import_module(self, name: str, package: str | None = None) -> ModuleType:
        self._see(name, package or "", ())
        return self._originals[1](name, package)

    def _see(self, name: str, package: str, names: Iterable[str]) -> None:
        try:
            absolute = resolve_name(name, package)
        except ImportError:  # which the import itself raises
            return
        modules = [
            *accumulate(absolute.split("."), "{}.{}".format),
            *(f"{absolute}.{each}" for each in names),
        ]
        new = [module for module in modules if module in self._inherited and module not in self._seen]
        if new:
            caller = sys._getframe(2)  # noqa: SLF001
            self._look_at(new, f"line {caller.f_lineno} of {Path(caller.f_code.co_filename).name}")

    def _look_at(self, modules: list[str], place: str) -> None:
        """The first import of inherited modules, at this place."""
        if modules[0].partition(".")[0] not in INDEPENDENT:
            change = self._change()
            if change and os.getpid() == self._pid:  # and not in a child of the worker's
                self._begin_again(f"{place} imports {modules[0]} after the recipe {change}")
        for module in modules:
            self._seen.update([module, *self._brought.get(module, ())])
        if not self._is_recipe and "torch" in self._seen and self in _watches:
            self._stop()

    def _imports_library(self) -> bool:
        """Whether the module that runs its first lines here is an installed one."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
        while frame is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        if frame is None or frame.f_globals.get("__name__") == "__main__":
            return False
        return is_inside(os.path.realpath(frame.f_code.co_filename), self._libraries)

    def _change(self) -> str:
        """What the recipe has changed that an import may depend on, in words; else nothing."""
        if self._variables.changed:
            names = ", ".join(self._variables.changed)
            return f"set {names}; set it in the environment of the command, and workers are forked again"
        if self._finders != [*sys.meta_path, *sys.path_hooks]:
            return "changed sys.meta_path or sys.path_hooks"
        changed = [name for name, module in self._inherited.items() if sys.modules.get(name) is not module]
        new = sys.modules.keys() - self._inherited.keys() - {"__main__"}
        # Imports give each module a specification; a stand-in that the recipe put there has none.
        changed += [name for name in new if getattr(sys.modules[name], "__spec__", None) is None]
        if changed:
            return f"changed sys.modules[{changed[0]!r}]"
        return self._change_of_path()

    def _change_of_path(self) -> str:
        """A new folder matters only if it holds a file of an inherited module's name."""
        path = [*dict.fromkeys(sys.path)]
        if [entry for entry in path if entry in self._path] != self._path:
            return "took folders from sys.path or changed their order"
        tops = {name for name in self._inherited if "." not in name}
        for entry in path:
            folder = Path(entry or ".")
            if entry in self._path or not folder.exists():
                continue
            if not folder.is_dir():
                return f"added {entry} to sys.path"
            for name in sorted(tops & {file.name.partition(".")[0] for file in folder.iterdir()}):
                spec = PathFinder.find_spec(name, [entry])
                here = None if spec is None else spec.origin
                there = getattr(self._inherited[name], "__file__", None)
                if here is not None and os.path.realpath(here) != os.path.realpath(there or ""):
                    return f"added {entry}, which has a {name} of its own, to sys.path; install that one instead, and workers are forked again"
        return ""


def finish() -> None:
    """At elastic.start; nothing where no import is watched, as in a spawned worker."""
    for watch in [*_watches]:
        watch.finish()
