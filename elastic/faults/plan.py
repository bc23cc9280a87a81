"""A fault plan is a list of faults; a trigger says when each happens, an action what breaks.

A trigger is reached at most once in a generation; a fault is injected once in a run, however often
its trigger is reached again because steps are replayed. Kills at random intervals are the
exception: they are repeated.

A plan holds no fault that a process cannot inject into itself or into the processes of its node: no
cut network, no full disk, no lost machine. The tests in containers (tests/cluster) do those.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from elastic.errors import UsageError

STEP_POINTS = ("forward", "backward", "mid-sum", "optimizer", "snapshot", "after-snapshot")
SAVE_POINTS = ("upload", "before-commit", "after-commit")
FLIP_TARGETS = ("parameters", "optimizer", "gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """In the worker of a rank, at one of the `STEP_POINTS` of a step."""

    step: int
    rank: int = 0
    point: str = STEP_POINTS[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtNode:
    """In the agent of a node, as soon as all its workers have finished this step or a later one.

    Nodes are counted from 0, in the order of the ranks that their workers have.
    """

    step: int
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSave:
    """In the uploader that saves this step, at one of the `SAVE_POINTS`."""

    step: int
    point: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRestore:
    """In a worker of this generation that has loaded the state and not reported it yet."""

    generation: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRendezvous:
    """In the agent of a node of this generation, before it starts its workers."""

    generation: int
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AtIntervals:
    """A worker is killed again and again, `period_s` ± `jitter_s` seconds after the kill before.

    The wait and the victim of a kill are drawn from the seed and the number of the kill, counted
    from 0, and from nothing else.
    """

    period_s: float
    jitter_s: float
    seed: int

    def wait_s(self, kill: int) -> float:
        """Seconds from the kill before to this one."""
        return self.period_s + self.jitter_s * (2 * self._draw(kill, "wait") - 1)

    def pick(self, kill: int, among: int) -> int:
        """The index of the victim among so many candidates, from 0."""
        return int(self._draw(kill, "victim") * among)

    def _draw(self, kill: int, purpose: str) -> float:
        """A number in [0, 1)."""
        digest = sha256(f"{self.seed} {kill} {purpose}".encode()).digest()
        return int.from_bytes(digest[:6], "little") / (1 << 48)


Trigger = AtStep | AtNode | AtSave | AtRestore | AtRendezvous | AtIntervals


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL; for a node, to its agent and every process that the agent started."""


@dataclass(frozen=True, slots=True)
class Raise:
    """An exception in the recipe."""


@dataclass(frozen=True, slots=True)
class Exit:
    code: int


@dataclass(frozen=True, slots=True)
class Hang:
    """The main thread stands still; the process lives."""


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP, and SIGCONT so many seconds later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Slow:
    """Each step takes `factor` times as long, for `steps` steps; None: for the whole generation."""

    factor: float
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit changes in the memory of this rank, in the largest tensor of what is named."""

    target: str = FLIP_TARGETS[0]


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to an agent."""


FaultAction = Kill | Raise | Exit | Hang | Pause | Slow | Flip | Terminate
Forms = dict[str, type[FaultAction]]

# How triggers and actions are written. A field that a form lacks has its default.
TRIGGERS: dict[str, type[Trigger]] = {
    "step {step} rank {rank} {point}": AtStep,
    "step {step} rank {rank}": AtStep,
    "step {step} {point}": AtStep,
    "step {step}": AtStep,
    "step {step} node {node}": AtNode,
    "checkpoint {step} {point}": AtSave,
    "generation {generation} rank {rank} restore": AtRestore,
    "generation {generation} node {node} rendezvous": AtRendezvous,
}
_WORKERS: Forms = {"kill": Kill, "raise": Raise, "exit {code}": Exit, "hang": Hang, "pause {seconds}s": Pause}
_NODES: Forms = {"kill": Kill, "pause {seconds}s": Pause, "terminate": Terminate}
ACTIONS: dict[type[Trigger], Forms] = {
    AtStep: _WORKERS
    | {"slow {factor}x": Slow, "slow {factor}x for {steps} steps": Slow}
    | {"flip {target}": Flip, "flip": Flip},
    AtRestore: _WORKERS,
    AtNode: _NODES,
    AtRendezvous: _NODES,
    AtSave: {"kill uploader": Kill, "pause {seconds}s": Pause},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a plan.

    `text` is the line as the user wrote it: events quote it, and its claim is named after it.
    """

    text: str
    trigger: Trigger
    action: FaultAction


def check_fits(faults: Iterable[Fault], *, nodes: int, nproc: int | None, is_plain: bool = False) -> None:
    """Check that a run of at most `nodes` nodes with `nproc` workers each can reach every trigger.

    `nproc` is None while it is not known. Raises UsageError for a fault that can never be injected.
    """
    for fault in faults:
        match fault.trigger:
            case AtNode(node=node) | AtRendezvous(node=node) if node >= nodes:
                _refuse(fault, f"a node from 0 to {nodes - 1} (--max-nodes {nodes})", str(node))
            case AtStep(rank=rank) | AtRestore(rank=rank) if nproc is not None and rank >= nodes * nproc:
                _refuse(fault, f"a rank from 0 to {nodes * nproc - 1} ({nodes} nodes of {nproc})", str(rank))
            case AtStep() | AtNode() | AtSave() | AtRestore() if is_plain:
                found = "a script that does not import the library and has none"
                _refuse(fault, "a recipe with steps, checkpoints and restores", found)


def _refuse(fault: Fault, expected: str, found: str) -> None:
    raise UsageError(f"fault plan: expected {expected}, found {found} in {fault.text!r}")
