"""Every message from and to the uploader is a frozen value, or refused; never pickle.

It does not promise who is at the other end: the folder and the mode of the socket decide that.

client     Offer, with the descriptors of the memory that holds the snapshot and of a socket
uploader   SaveResult through that socket, once its save is over

An offer is one datagram: it comes whole, with its descriptors, or not at all. It waits in a socket
that is the owner's, so that it outlives an uploader that dies before it reads it.
"""

import os
from dataclasses import dataclass, field
from enum import StrEnum

from elastic.checkpoint.record import SAVE_S
from elastic.config.run_dir import RunDir
from elastic.system.clock import boot_wall_s
from elastic.system.untrusted import Count, Positive

MESSAGE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class UploaderConfig:
    """The settings of one uploader, whose socket is in the folder `scratch`.

    `keep`: the number of checkpoints that retention leaves. `save_deadline_s`: for a save, beside
    the time that its size takes (record.py). `uid`: of the run directory, in which nothing is saved
    once it has another one; empty without an agent. `faults` is a fault plan. `offers`, `fence`:
    descriptors that it inherits, of the socket and of the agent's FencePage, if there is one.
    `owner`, `boot_wall_s` (system/clock.py): of the process that starts the uploader.
    """

    run_url: str
    scratch: str
    run_id: str
    node: str
    keep: int
    uid: str = ""
    faults: str | None = None
    offers: int = -1
    fence: tuple[int, ...] = ()
    save_deadline_s: float = SAVE_S
    owner: int = field(default_factory=os.getpid)
    boot_wall_s: float = field(default_factory=boot_wall_s)

    @property
    def run(self) -> RunDir:
        return RunDir.parse(self.run_url)

    @property
    def socket_path(self) -> str:
        return f"{self.scratch}/uploader"


class SaveState(StrEnum):
    COMMITTED = "committed"
    FAILED = "failed"
    DROPPED = "dropped"  # a newer save took its place
    FENCED = "fenced"
    DIFFERS = "differs"  # this step was committed before, with another state
    LOST = "lost"  # its uploader died, and nothing records how the save ended


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """How the save of `step` ended; `reason`: why not well, for people.

    `digest`: of the committed state, in hexadecimal, else empty. `is_ours`: this save wrote the
    checkpoint; else, if committed, another writer did so before. `seconds`
    are of wall time, `cpu_s` of processor time that the uploader took. `size_bytes`: of the
    checkpoint.
    """

    step: int
    state: SaveState
    reason: str = ""
    is_ours: bool = False
    seconds: float = 0.0
    digest: str = ""
    cpu_s: float = 0.0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One snapshot to save, in the memory whose descriptor comes with the offer.

    It lies in `slot`, and was published there as `seq`; its header tells the rest. `step` and
    `generation` are repeated here for a result, should it be written over. `resumed_from`: the step
    of the checkpoint from which training resumed, above which retention distrusts older
    generations; None where that is not known. `is_final`: no training goes on beside the save.
    `wants_digest`: of a state in parts, for which all of it is read.
    """

    step: Count
    generation: Count
    slot: Count
    seq: Positive
    resumed_from: Count | None
    is_final: bool
    wants_digest: bool = False

    def result(self, state: SaveState, reason: str) -> SaveResult:
        """For a save that committed nothing."""
        return SaveResult(step=self.step, state=state, reason=reason)
