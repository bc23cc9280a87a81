"""What a recipe sets before elastic.start acts on the modules that it imports, or it is told.

A forked process has inherited modules, which the fork server imported under the environment of the
command. Where a recipe has changed a variable, or put a folder in front of such a module, plain
python may have run the module under the change. `elastic.start` compares once. A preflight that
finds a change has the agent spawn all workers, which inherit nothing. A worker that finds one where
the preflight found none says so.

It does not know whether the change came before the import: then the workers are spawned in vain. It
does not see finders, or stand-ins that a recipe puts into `sys.modules`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from elastic.config import environment
from elastic.worker.preload import Preloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What this process began with."""

    preloaded: Preloaded
    variables: dict[str, str]
    path: tuple[str, ...]


_begun: list[Inherited] = []  # of this process; empty in one that was spawned


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
