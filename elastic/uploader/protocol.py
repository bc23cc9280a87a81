"""Every message from and to the uploader is a frozen value, or refused; never pickle.

It does not promise who is at the other end: the folder and the mode of the socket decide that.

client     Offer, with the descriptor of the memory that holds the snapshot
uploader   SaveResult, one for each offer, once its save is over
"""

import json
import os
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from elastic.checkpoint.record import SAVE_S
from elastic.config.run_dir import RunDir
from elastic.system.clock import boot_wall_s
from elastic.system.untrusted import Count, Positive, decode


@dataclass(frozen=True, slots=True, kw_only=True)
class UploaderConfig:
    """The settings of one uploader.

    `keep`: the number of checkpoints that retention leaves. `save_deadline_s`: for a save, beside
    the time that its size takes (record.py). `uid`: of the run directory, in which nothing is saved
    once it has another one; empty without an agent. `metrics`: a file that is uploaded before each
    commit; empty where the run directory is a folder. `fence`: of the agent's FencePage; empty
    without an agent. `faults` is a fault plan, `faults_path` the folder that remembers which of its
    faults have struck. `owner`, `boot_wall_s` (system/clock.py): of the process that starts the
    uploader.
    """

    checkpoints_url: str
    run_url: str
    run_id: str
    node: str
    keep: int
    socket_path: str
    events_path: str
    faults_path: str
    uid: str = ""
    metrics: str = ""
    fence: str = ""
    faults: str | None = None
    save_deadline_s: float = SAVE_S
    owner: int = field(default_factory=os.getpid)
    boot_wall_s: float = field(default_factory=boot_wall_s)

    @staticmethod
    def of(
        run: RunDir, scratch: Path, *, run_id: str, node: str, keep: int, uid: str = ""
    ) -> "UploaderConfig":
        """For `node`, with a socket in the folder `scratch`; without a fence and without faults."""
        return UploaderConfig(
            checkpoints_url=run.checkpoints_url,
            run_url=run.url,
            run_id=run_id,
            node=node,
            keep=keep,
            socket_path=str(scratch / "uploader"),
            events_path=str(run.events / f"{node}-uploader.jsonl"),
            faults_path=str(run.faults),
            uid=uid,
            metrics=str(run.metrics_of(node)) if run.is_remote else "",
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> "UploaderConfig":
        return decode(UploaderConfig, text, what="the uploader's configuration")


class SaveState(StrEnum):
    COMMITTED = "committed"
    FAILED = "failed"
    DROPPED = "dropped"  # a newer save took its place
    FENCED = "fenced"
    DIFFERS = "differs"  # this step was committed before, with another state
    LOST = "lost"  # its uploader died, and nothing records how the save ended


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """How the save of `step` ended, with a `reason` for people.

    `digest`: of the committed state, in hexadecimal, else empty. `is_ours`: this save wrote the
    checkpoint; a committed one of another owner was committed by another writer before. `seconds`
    are of wall time, `cpu_s` of processor time that the uploader took.
    """

    step: int
    state: SaveState
    reason: str
    is_ours: bool = False
    seconds: float = 0.0
    digest: str = ""
    cpu_s: float = 0.0

    @staticmethod
    def parse(message: dict[str, Any]) -> "SaveResult":
        """Raises ValueError that says which value is wrong."""
        return decode(SaveResult, message, what="the result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One snapshot to save, in the memory whose descriptor comes with the offer.

    It lies in `slot`, and was published there as `seq`; its header tells the rest. `step` and
    `generation` are repeated here for a result, should it be written over. `resumed_from`: the step
    of the checkpoint from which training resumed, None where that is not known; retention distrusts
    what was passed over then. `is_final`: no training goes on beside the save.
    """

    step: Count
    generation: Count
    slot: Count
    seq: Positive
    resumed_from: Count | None
    is_final: bool

    @staticmethod
    def parse(message: dict[str, Any]) -> "Offer":
        """Raises ValueError that says which value is wrong."""
        return decode(Offer, message, what="the offer")

    def result(self, state: SaveState, reason: str) -> SaveResult:
        """For a save that committed nothing."""
        return SaveResult(step=self.step, state=state, reason=reason)
