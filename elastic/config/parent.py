"""A run may begin from a committed state of another run, its parent: what names it and records it.

A command names it as `RUN[@STEP][:NAME,...]`. run.json records the state that was found there,
and the parents of the parent, so that a lineage does not depend on folders that may be gone.
"""

import re
import shlex
from dataclasses import dataclass
from typing import Annotated

from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.system.untrusted import Count, pattern

FORM = "RUN[@STEP][:NAME,...]"
# A folder's own name may have @ and : where a / follows, as in a URL.
_ORIGIN = re.compile(r"((?:.*/)?[^@:/]*)(?:@([0-9]{1,12}))?(?::([^\W\d]\w*(?:,[^\W\d]\w*)*))?", re.DOTALL)
_Digest = Annotated[str, pattern("[0-9a-f]{64}", "64 digits in hex")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What `--from` names. step: None for the newest. entries: of its State, none for all."""

    run: str
    step: int | None = None
    entries: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> "Origin":
        """Raises UsageError. A folder whose own name has `@` or `:` gets a `/` behind it."""
        found = _ORIGIN.fullmatch(text)
        if found is None or not found[1]:
            raise UsageError(
                f"expected {FORM}, such as runs/barlow@200:model,optimizer, found {text!r};"
                " a folder that has @ or : in its own name gets a / behind it"
            )
        run, step, entries = found.groups()
        return Origin(
            run=run,
            step=None if step is None else int(step),
            entries=tuple(sorted(set(entries.split(",")))) if entries else (),
        )

    @property
    def run_dir(self) -> RunDir:
        return RunDir.parse(self.run)

    def __str__(self) -> str:
        step = "" if self.step is None else f"@{self.step}"
        return self.run + step + (f":{','.join(self.entries)}" if self.entries else "")


def new_run_from(run: str, recipe: str = "RECIPE", entries: str = "") -> str:
    """The command that begins a new run from the newest state of this one, or entries of it."""
    is_read_otherwise = set("@:") & set(run.rpartition("/")[2])
    parent = shlex.quote(f"{run}{'/' * bool(is_read_otherwise)}{entries and f':{entries}'}")
    return f"elastic-train {recipe} --from {parent} --run-dir NEW"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """A committed state of a run; digest: of the state, in hexadecimal."""

    run_id: str
    step: Count
    digest: _Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The state that a run began from. entries: those that it took, none for all.

    url: where the parent was. ancestors: what the parent itself descends from, oldest first.
    """

    run_id: str
    url: str
    step: Count
    digest: _Digest
    entries: tuple[str, ...] = ()
    ancestors: tuple[Ancestor, ...] = ()

    @property
    def lineage(self) -> tuple[Ancestor, ...]:
        """Oldest first, the parent last."""
        return *self.ancestors, Ancestor(run_id=self.run_id, step=self.step, digest=self.digest)

    @property
    def compared(self) -> list[object]:
        """What a run's result depends on: not the place where the parent was found."""
        return [self.run_id, self.step, self.digest, list(self.entries)]

    def __str__(self) -> str:
        entries = f", entries {', '.join(self.entries)}" if self.entries else ""
        return f"step {self.step} of {self.url} (digest {self.digest[:16]}){entries}"
