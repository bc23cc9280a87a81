"""A run directory belongs to one run; a resume must match everything that its result depends on.

The result is a function of the recipe, its arguments, the seed, the global batch and the shards,
for one build of torch, one kind of device and one number of threads; and of the state that it began
from, if that is another run's. Of the build, its version is compared (such as 2.9.0+cpu). The
recipe's text is recorded but not compared: fixing a bug and resuming is the user's decision.

A command names that other run, the parent, as `RUN[@STEP][:NAME,...]`. run.json records the state
that was found there, and the parents of the parent, so that a lineage does not depend on folders
that may be gone.
"""

import hashlib
import json
import re
import shlex
from dataclasses import asdict, dataclass
from typing import Annotated

from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.system.untrusted import Count, decode, pattern

NAME = "run.json"
FORMAT = 3  # 2 had one commit record for all attempts of a step
REMEDY = "take another --run-dir, or set a folder aside with --fresh"
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
        names = tuple(sorted(set(entries.split(",")))) if entries else ()
        return Origin(run=run, step=None if step is None else int(step), entries=names)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    recipe: str  # file name, without folder
    recipe_sha256: str
    arguments: tuple[str, ...]
    seed: int
    global_batch: int
    shards: int
    torch: str
    device: str  # cpu or cuda
    threads: int
    format: int = FORMAT
    parent: Parent | None = None

    @property
    def run_id(self) -> str:
        """Equal for two runs exactly if everything that is compared is equal."""
        compared = [_compared(self, field) for field in _COMPARED if getattr(self, field) is not None]
        return hashlib.sha256(json.dumps(compared).encode()).hexdigest()[:16]

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """setting: what messages call it. a, b: its value in each run."""

    setting: str
    a: str
    b: str


# The fields that are compared, and what messages call them.
_COMPARED = {
    "recipe": "recipe",
    "arguments": "recipe arguments",
    "seed": "seed",
    "global_batch": "global batch",
    "shards": "shards",
    "torch": "torch version",
    "device": "kind of device",
    "threads": "threads a worker (OMP_NUM_THREADS)",
    "format": "format of the run directory",
    "parent": "begins from",
}


def parse(text: bytes, *, remedy: str = REMEDY) -> Identity:
    """Raises UsageError, which ends with the remedy, if the text is not an identity."""
    try:
        return decode(Identity, text, what=NAME)
    except ValueError as error:
        raise UsageError(f"{error}; {remedy}") from error


def check(found: Identity, ours: Identity, run_dir: str) -> None:
    """Raises UsageError, which names every difference, if the directory holds another run."""
    differences = [f"{each.setting}: {each.a} there, {each.b} here" for each in _differences(found, ours)]
    if differences:
        raise UsageError(
            f"{run_dir} holds another run ({'; '.join(differences)}); "
            "resume it with the command that began it; begin another run from its state with these settings "
            f"({new_run_from(run_dir)}); {REMEDY}"
        )


def differences(a: Identity, b: Identity) -> list[SettingDifference]:
    """What two runs were begun with that is not the same, the recipe's text among it."""
    shown = [f"sha256 {each.recipe_sha256[:12]}" for each in (a, b)]
    text = SettingDifference(setting="recipe's text", a=shown[0], b=shown[1])
    return [*_differences(a, b), *([text] if a.recipe_sha256 != b.recipe_sha256 else [])]


def _differences(a: Identity, b: Identity) -> list[SettingDifference]:
    return [
        SettingDifference(setting=words, a=_text(getattr(a, field)), b=_text(getattr(b, field)))
        for field, words in _COMPARED.items()
        if _compared(a, field) != _compared(b, field)
    ]


def _compared(identity: Identity, field: str) -> object:
    value = getattr(identity, field)
    return value.compared if isinstance(value, Parent) else value


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return "none" if value is None else str(value)
