"""Everything noteworthy that can happen to a run, one frozen record each.

The log adds `time` (seconds since 1970), `node` and `generation` to each record and writes it as one JSON line;
console, report, status and tests read these records and nothing else. A field is only ever added, with a default, never renamed.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    @property
    def name(self) -> str:
        """GenerationStarted is written as generation_started."""
        return _snake(type(self).__name__)

    def fields(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """Written by rank 0 of every generation; `steps` is the last step of the run."""

    steps: int
    epochs: int
    seed: int
    global_batch: int
    shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted(Event):
    """Written by the agent of rank 0. `cause`: start, resume, failure, node lost, node joined or node left."""

    world_size: int
    nodes: list[str]
    cause: str
    restarts: int  # consecutive restarts without a new step


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnded(Event):
    """Written by each agent when it sees that its generation is over; `step` is the last its own workers finished."""

    cause: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(Event):
    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(Event):
    """`code` is None when `signal` is set. `victim`: it was killed, or broke, because another one died first."""

    rank: int
    pid: int
    code: int | None
    signal: str | None
    victim: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed(Event):
    """The traceback of a worker that raised, as its own process told it."""

    rank: int
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDetected(Event):
    """An agent takes a worker of its own for hung; the stacks of all its threads follow in the worker's log, then it is killed.

    `place`: start, step, wait, between, save or after. `silence_s`: seconds without a sign of progress; `limit_s`: how many it was allowed there.
    """

    rank: int
    place: str
    silence_s: float
    limit_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested(Event):
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Event):
    """All ranks stopped after the same step. `committed`: a checkpoint holds it already; else the agents' memory does, and they commit it if the run ends here."""

    step: int
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    """Written by rank 0; `lost_steps` were done before and come again.

    `source`: snapshot (each node had it in memory), peer (some got it from another node's memory), checkpoint, or none for a start from the seed.
    """

    step: int
    source: str
    lost_steps: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep(Event):
    """Rank 0 finished the first step of its generation that had never been trained before."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Event):
    step: int
    size_bytes: int
    seconds: float
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Event):
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFenced(Event):
    """A save that was given up because its node is in no generation any more."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRejected(Event):
    """A committed checkpoint that did not load; the next older one is used and this one is left where it is."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInterval(Event):
    """`--snapshot-every auto` chose to keep the state every so many steps: one costs `cost_s`, a step takes `step_s` (medians, in seconds)."""

    every: int
    cost_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRejected(Event):
    """A state in memory that is not used: nodes disagree about it, or it was restored again and again without a new step."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected(Event):
    """`step` is the one that is trained or saved, for an agent's strike the last that its workers finished, 0 for none; None at a restore or a rendezvous."""

    fault: str
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished(Event):
    steps: int
    epochs: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed(Event):
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInterrupted(Event):
    """An agent leaves with exit 75; `step` is the newest committed checkpoint."""

    step: int


# The last events of an agent: its node is gone, however young its last heartbeat.
GOODBYES = (RunInterrupted, RunFailed, RunFinished)
KINDS = {_snake(kind.__name__): kind for kind in Event.__subclasses__()}
