"""What one agent knows of its run before it starts anything; none of it ever changes."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from elastic.config.identity import Identity
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.rendezvous.backends.select import RendezvousConfig
from elastic.rendezvous.shared_settings import LONGEST_NAME, RunKey
from elastic.system.untrusted import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The command as it was given, and what follows from it on this node."""

    options: Options
    run: RunDir
    rendezvous: RendezvousConfig
    node: str  # the id of this agent process, which no other process ever has
    nproc: int  # workers of this node
    declared: Identity | None  # what the recipe declared; None for a script without the library
    uid: str  # of the run directory
    is_new: bool  # the run directory held no run when this agent started
    scratch: Path  # a folder of this process alone, removed at its end

    @property
    def imports_library(self) -> bool:
        """False for a script without the library, which is asked to stop as torchrun asks."""
        return self.declared is not None

    @property
    def does_steps_again(self) -> bool:
        """Whether a step may be done twice, by other workers, to compare its results."""
        options = self.options
        return self.imports_library and "off" not in (options.rehearse.kind, options.snapshot_every.kind)

    @property
    def evidence(self) -> Path:
        """Where workers leave what a step computed, for those that do it again."""
        return self.scratch / "evidence.json"

    @property
    def run_id(self) -> str:
        return "" if self.declared is None else self.declared.run_id

    @property
    def run_key(self) -> RunKey:
        """What the nodes of a group compare. A script without the library is its command."""
        options = self.options
        command = json.dumps([Path(options.recipe).name, *options.recipe_args])
        run_id = self.run_id or hashlib.sha256(command.encode()).hexdigest()[:16]
        title = printable(f"{Path(options.recipe).name} in {self.run.url}")[:LONGEST_NAME]
        return RunKey(run_id=run_id, uid=self.uid, title=title)

    def error_folder(self, generation: int) -> Path:
        """Where the workers of a generation leave the errors that ended them."""
        return self.scratch / "errors" / str(generation)
