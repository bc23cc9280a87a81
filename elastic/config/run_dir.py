"""The folders and files at the top of a run directory have their names here.

Names inside a folder belong to the module that writes
there: checkpoint/record.py, the rendezvous backends, faults/inject.py, for events agent/launch.py,
train/start.py and uploader/protocol.py, and for the parts of a remote run observe/upload_parts.py.

A run directory is a local or shared folder, or any fsspec URL. Checkpoints, `run.json` and the
group's state are at the URL itself. Files that grow line by line (metrics, events, logs) need a
file system: with a remote URL, each node keeps its own copies in a local folder below `runs/`,
named after the URL and a hash of it, and uploads them in parts (observe/upload_parts.py).
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from elastic.errors import UsageError

_IDENTITY = "run.json"  # of config/identity.py
UID = "uid"  # checkpoint/provenance.py
PLACE = "place"  # rendezvous/meeting_place.py
# What stands at the top of a run directory; files of a recipe's own have other names.
_FOLDERS = {"checkpoints", "metrics", "events", "logs", "rendezvous", "faults"}
OWN_NAMES = frozenset({_IDENTITY, UID, PLACE, "stopped.json", "metrics.jsonl"} | _FOLDERS)

OWN_PREFIX = ".metrics-"  # of the metrics of each generation

URL_DIGITS = 8  # of the sha256 of a URL, in the name of its local folder


class _Below:
    """What has this name in the local folder of a run directory, as an attribute of that."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDir", _: type) -> Path:
        return run.local / self._name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """copies: of the metrics, one file for each node, if the run is remote."""

    url: str
    local: Path

    metrics = _Below("metrics.jsonl")
    copies = _Below("metrics")
    events = _Below("events")
    rendezvous = _Below("rendezvous")
    faults = _Below("faults")
    logs = _Below("logs")

    @staticmethod
    def parse(text: str) -> "RunDir":
        if text.startswith("file://"):
            text = text.removeprefix("file://")
        if "://" not in text:
            # Only a name that names the folder itself can be renamed (--fresh).
            path = Path(text).resolve() if ".." in Path(text).parts else Path(text).absolute()
            return RunDir(url=str(path), local=path)
        url = text.rstrip("/")
        # Two URLs may have the same name here: s3://b/x/y and s3://b/x-y.
        digest = hashlib.sha256(url.encode(errors="surrogateescape")).hexdigest()[:URL_DIGITS]
        return RunDir(url=url, local=Path("runs").absolute() / f"{_name_of(url)}-{digest}")

    @property
    def is_remote(self) -> bool:
        return self.url != str(self.local)

    @property
    def checkpoints_url(self) -> str:
        return f"{self.url}/checkpoints"

    @property
    def rendezvous_url(self) -> str:
        return f"{self.url}/rendezvous"

    def metrics_of(self, node: str) -> Path:
        """The file that a node writes: the run's own, or the node's copy if the run is remote."""
        return self.copies / f"{node}.jsonl" if self.is_remote else self.metrics

    def of_recipe(self, name: Any) -> Path:
        """Where a file of the recipe's own belongs. Raises UsageError for a name of the run's own.

        Also for a path that leads out of the run directory.
        """
        example = (
            "expected run.path(name), a name below the run directory such as 'weights.pth' or 'samples/3.png'"
        )
        parts = PurePath(name).parts if isinstance(name, str | PurePath) else ()
        if not parts or PurePath(name).is_absolute() or ".." in parts or "\0" in str(name):
            raise UsageError(f"{example}, found {name!r:.100}; write files for other places without run.path")
        if parts[0] in OWN_NAMES or parts[0].startswith(OWN_PREFIX):
            raise UsageError(
                f"{example}, found {str(name)!r}: {parts[0]} is the run's own, which a resume reads; take another name"
            )
        return self.local.joinpath(*parts)

    def log(self, *, generation: int, rank: int) -> Path:
        return self.logs / f"{generation:06d}" / f"rank{rank}.log"


def _name_of(url: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", url.replace("://", "-")).strip("-")
