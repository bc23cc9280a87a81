"""A commit record has all that is needed to trust a checkpoint; anything less is damage.

It does not promise that the payload exists or is whole: payload_check.py compares the payload
with the record. Names below the checkpoints' URL are parsed here and nowhere else.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from elastic.errors import CheckpointDamaged
from elastic.system.untrusted import Count, decode, exactly, parse_json, pattern

FORMAT = 5
PAYLOAD = "state.safetensors"
COMMIT = "COMMIT.json"
_PART = re.compile(r"part-[0-9]{5}-[0-9a-f]{8}\.safetensors")

_ATTEMPT = r"a-([0-9]{6,12})-[0-9a-f]{8}"
_NAME = re.compile(rf"(([0-9]{{12}})/{_ATTEMPT})/(.+)")
_Hash = Annotated[str, pattern("[0-9a-f]{64}", "64 digits in hex")]

SAVE_S = 600.0  # for what does not depend on the size: outages, retries, other writers
LEAST_BYTES_PER_S = 1e6


def save_limit_s(fixed_s: float, size_bytes: int) -> float:
    """How long the save of a payload may take; fixed_s: the part that its size does not change.

    A storage library does not tell how far it is with an object. So a bandwidth is assumed that
    every useful storage has, and a slow upload that moves is not cut off.
    """
    return fixed_s + size_bytes / LEAST_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """The training side's facts about one image, which become a record once the image is stored.

    `step` counts completed updates from 1 (0: the untrained state).
    """

    run_id: str
    step: Count
    generation: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashes:
    """The three fingerprints of an image, in hexadecimal.

    digest: of the training state. sha256: of the image's parts (both: snapshot/image_hash.py).
    checksum: as of the SnapshotInfo; a node compares it with its own to know that the committed
    state is the one in its memory.
    """

    digest: str
    sha256: _Hash
    checksum: _Hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stored part of a state (snapshot/division.py). name: in the folder of its attempt. sha256:
    of the parts of its image, as of `Hashes`.
    """

    name: Annotated[str, pattern(_PART.pattern, "the name of a part")]
    size_bytes: Count
    sha256: _Hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A file of a checkpoint. digest: of the state in it, where it is all of the state."""

    name: str
    size_bytes: int
    sha256: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord(Save):
    """A save whose payload is stored; `digest`, `sha256` and `checksum` are those of `Hashes`.

    `attempt` is another one for each save. `created` is in seconds since 1970, for people. parts:
    of a sharded state; then the sha256 is that of theirs, the checksum that of the state
    (State.evidence), and the digest empty unless it was asked for.
    """

    format: Annotated[int, exactly(FORMAT)]
    attempt: Annotated[str, pattern(_ATTEMPT, "the name of an attempt")]
    size_bytes: Count
    digest: Annotated[str, pattern("|[0-9a-f]{64}", "64 digits in hex, or none")]
    sha256: _Hash
    checksum: _Hash
    created: float
    parts: tuple[Part, ...] = ()

    @property
    def payloads(self) -> tuple[Stored, ...]:
        """The files that hold the state: one, or its parts in order."""
        if not self.parts:
            one = Stored(
                name=self.payload, size_bytes=self.size_bytes, sha256=self.sha256, digest=self.digest
            )
            return (one,)
        return tuple(
            Stored(name=f"{self.folder}/{each.name}", size_bytes=each.size_bytes, sha256=each.sha256)
            for each in self.parts
        )

    @property
    def folder(self) -> str:
        """Of the payload and this record, relative to the checkpoints' URL."""
        return f"{step_dir(self.step)}/{self.attempt}"

    @property
    def payload(self) -> str:
        return f"{self.folder}/{PAYLOAD}"

    @property
    def name(self) -> str:
        return f"{self.folder}/{COMMIT}"

    def to_json(self) -> bytes:
        return sealed({name: value for name, value in asdict(self).items() if name != "parts" or value})


def parse(data: bytes) -> CommitRecord:
    """The record, as it was written, which names nothing outside its folder.

    Raises CheckpointDamaged.
    """
    body = unsealed(data)
    if body.get("format") != FORMAT:
        raise CheckpointDamaged(
            f"expected a commit record of format {FORMAT}, found {body.get('format')!r:.20}: another version of elastic-train wrote it;"
            " resume with that version, or take another --run-dir"
        )
    try:
        found = decode(CommitRecord, {"parts": [], **body}, what="the commit record")
    except ValueError as error:
        raise CheckpointDamaged(str(error)) from error
    if found.parts and (found.size_bytes, found.sha256) != sums_of(found.parts):
        raise CheckpointDamaged("the commit record names other parts than it was made for")
    return found


def sums_of(parts: Sequence[Part]) -> tuple[int, str]:
    """The size in bytes and the sha256 of a state in these parts."""
    sha256 = hashlib.sha256("".join(each.sha256 for each in parts).encode()).hexdigest()
    return sum(each.size_bytes for each in parts), sha256


def sealed(body: dict[str, Any]) -> bytes:
    """JSON with a checksum of itself."""
    return json.dumps(body | {"self_sha256": _checksum(body)}, sort_keys=True, indent=1).encode() + b"\n"


def unsealed(data: bytes) -> dict[str, Any]:
    """Raises CheckpointDamaged."""
    try:
        body = parse_json(data)
    except ValueError as error:
        raise CheckpointDamaged(f"the commit record is not JSON ({len(data)} bytes: {error})") from error
    if not isinstance(body, dict) or body.pop("self_sha256", None) != _checksum(body):
        raise CheckpointDamaged(
            "the commit record does not match its own checksum: it was changed after it was written"
        )
    return body


def step_dir(step: int) -> str:
    """12000 is 000000012000, so that names sort as steps do."""
    return f"{step:012d}"


def attempt_name(generation: int, own: str) -> str:
    """own: 8 digits in hex, other ones for each attempt."""
    return f"a-{generation:06d}-{own}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredName:
    """What an object's name says. folder: of the attempt that it belongs to, which `generation`
    wrote.
    """

    step: int
    folder: str
    generation: int
    is_record: bool


def parse_name(name: str) -> StoredName | None:
    """None for the name of an object that belongs to no attempt."""
    if (found := _NAME.fullmatch(name)) is None:
        return None
    folder, step, generation, inner = found.groups()
    return StoredName(step=int(step), folder=folder, generation=int(generation), is_record=inner == COMMIT)


def is_record_of_part(name: str) -> bool:
    return name.rpartition("/")[2].startswith("part-") and name.endswith(".json")


def _checksum(body: dict[str, Any]) -> str:
    try:
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"the commit record cannot be written down again: {error}") from error
    return hashlib.sha256(canonical).hexdigest()


def missing_text(committed_step: int, newest_step: int, run_url: str) -> str:
    """Says that a newer checkpoint was committed than all that can be found."""
    return (
        f"the group has committed step {committed_step}, and neither its nodes' memory nor {run_url} has that state: the newest is of"
        f" step {newest_step}. Is this an old copy, or not shared? Start on a node that has it; or forget it: stop all agents and"
        " remove rendezvous/ (etcd, c10d: give another --rdzv-id)"
    )
