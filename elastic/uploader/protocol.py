"""What uploader, workers and owner say to each other is one JSON object a line, parsed into values or refused; never pickle.

It does not promise who is at the other end: the socket's folder and mode decide that.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic.system.untrusted import Count, Positive, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSource:
    """The file of metrics that a node keeps for itself, and the URL of the run that it belongs to."""

    url: str
    metrics: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UploaderConfig:
    """`every`, in steps, may be None; `fence` says where the newest generation is shown, as fence.py reads it, or is None.

    `faults` is a fault plan, `faults_path` the folder where those that struck are remembered.
    `diary`: what is carried before a commit, None where the run directory is a folder.
    `entered`: the newest generation that this node is a member of, as far as is known when the uploader starts.
    """

    checkpoints_url: str
    run_id: str
    node: str
    keep: int
    every: int | None
    save_deadline_s: float
    socket_path: str
    events_path: str
    fence: str | None
    faults: str | None
    faults_path: str | None
    entered: int = 0
    diary: MetricsSource | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> "UploaderConfig":
        return decode(UploaderConfig, text, what="the uploader's settings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One image to save: the snapshot `seq` in `slot` of the memory whose descriptor came along. `is_final`: no other save may take its place."""

    step: Count
    epoch: Count
    generation: Count
    slot: Count
    seq: Positive
    offset: Count
    size_bytes: Positive
    world_size: Positive
    torch: str
    resumed_from: Count | None = None
    is_final: bool = field(default=False, metadata={"key": "final"})

    @staticmethod
    def parse(message: dict[str, Any]) -> "Offer":
        """Raises ValueError that says which value is wrong. Other keys are ignored."""
        return decode(Offer, message, what="an offer", exact=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entered:
    entered: Count | None = None


def entered(message: dict[str, Any]) -> int | None:
    """The generation that the owner's node has entered; None if the message does not say. Raises ValueError."""
    return decode(_Entered, message, what="a message", exact=False).entered
