"""A run directory belongs to one run; a resume must match everything that its result depends on.

The result is a function of the recipe, its arguments, the seed, the global batch and the shards,
for one build of torch, one kind of device and one number of threads. Of the build, its version is
compared (such as 2.9.0+cpu). The recipe's text is recorded but not compared: fixing a bug and
resuming is the user's decision.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

from elastic.errors import UsageError
from elastic.system.untrusted import decode

NAME = "run.json"
FORMAT = 1


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

    @property
    def run_id(self) -> str:
        """Equal for two runs exactly if everything that is compared is equal."""
        compared = [getattr(self, field) for field in _COMPARED]
        return hashlib.sha256(json.dumps(compared).encode()).hexdigest()[:16]

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


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
}


def parse(text: bytes) -> Identity:
    """Raises UsageError if the text is not an identity."""
    try:
        return decode(Identity, text, what=NAME)
    except ValueError as error:
        raise UsageError(f"{error}; take another --run-dir, or set this one aside with --fresh") from error


def check(found: Identity, ours: Identity, run_dir: str) -> None:
    """Raises UsageError, which names every difference, if the directory holds another run."""
    differences = [
        f"{words}: {_text(getattr(found, field))} there, {_text(getattr(ours, field))} here"
        for field, words in _COMPARED.items()
        if getattr(found, field) != getattr(ours, field)
    ]
    if differences:
        raise UsageError(
            f"{run_dir} holds another run ({'; '.join(differences)}); "
            "resume it with the command that began it, take another --run-dir, or set it aside with --fresh"
        )


def _text(value: object) -> str:
    return " ".join(value) or "none" if isinstance(value, tuple) else str(value)
