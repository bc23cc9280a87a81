"""What uploader, workers and owner say to each other is one JSON object a line, parsed into values or refused; never pickle.

It does not promise who is at the other end: the socket's folder and mode decide that.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any


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
        fields = json.loads(text)
        diary = fields.get("diary")
        return UploaderConfig(**fields | {"diary": None if diary is None else MetricsSource(**diary)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One image to save: the snapshot `seq` in `slot` of the memory whose descriptor came along. `is_final`: no other save may take its place."""

    step: int
    epoch: int
    generation: int
    slot: int
    seq: int
    offset: int
    size_bytes: int
    world_size: int
    torch: str
    resumed_from: int | None
    is_final: bool

    @staticmethod
    def parse(message: dict[str, Any]) -> "Offer":
        """Raises ValueError that says which value is wrong. Other keys are ignored."""
        return Offer(
            step=_number(message, "step", 0),
            epoch=_number(message, "epoch", 0),
            generation=_number(message, "generation", 0),
            slot=_number(message, "slot", 0),
            seq=_number(message, "seq", 1),
            offset=_number(message, "offset", 0),
            size_bytes=_number(message, "size_bytes", 1),
            world_size=_number(message, "world_size", 1),
            torch=_text(message, "torch"),
            resumed_from=None if message.get("resumed_from") is None else _number(message, "resumed_from", 0),
            is_final=message.get("final") is True,
        )


def entered(message: dict[str, Any]) -> int | None:
    """The generation that the owner's node has entered, where the message says so. Raises ValueError for one that cannot be."""
    return _number(message, "entered", 0) if "entered" in message else None


def _number(message: dict[str, Any], name: str, lowest: int) -> int:
    value = message.get(name)
    if type(value) is not int or not lowest <= value < 10**12:
        raise ValueError(
            f"expected {name} to be a whole number from {lowest} to 10**12 - 1, found {value!r:.80}"
        )
    return value


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise ValueError(f"expected {name} to be text, found {value!r:.80}")  # noqa: TRY004 - as above
    return value
