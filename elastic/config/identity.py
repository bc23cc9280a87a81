"""A run directory belongs to one run; a resume must match everything that its result depends on.

The result is a function of the recipe, its arguments, the seed, the global batch and the shards,
for one build of torch, one kind of device and one number of threads; and of the state that it began
from, if that is another run's. Of the build, its version is compared (such as 2.9.0+cpu). The
recipe's text is recorded but not compared: fixing a bug and resuming is the user's decision.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

from elastic.config.parent import Parent, new_run_from
from elastic.errors import UsageError
from elastic.system.untrusted import decode

NAME = "run.json"
FORMAT = 3  # 2 had one commit record for all attempts of a step
REMEDY = "take another --run-dir, or set a folder aside with --fresh"


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
            f"({new_run_from(run_dir)}); take another --run-dir, or set a folder aside with --fresh"
        )


def differences(a: Identity, b: Identity) -> list[SettingDifference]:
    """What two runs were begun with that is not the same, the recipe's text among it."""
    texts = [each.recipe_sha256 for each in (a, b)]
    text = SettingDifference(
        setting="recipe's text", a=f"sha256 {texts[0][:12]}", b=f"sha256 {texts[1][:12]}"
    )
    return [*_differences(a, b), *([text] if texts[0] != texts[1] else [])]


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
