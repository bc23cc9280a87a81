"""What a fault plan says, as values: a place in the run that is reached at most once a generation, and what breaks there.

`str` of a value is the line that reads back as the same value (grammar.py). Each fault but the repeated ones strikes once in a run, however often its place is reached.
What a process cannot do to itself, its machine or its network is not in here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from elastic.errors import UsageError

STEP_POINTS = ("forward", "backward", "mid-sum", "optimizer", "snapshot", "after-snapshot")
SAVE_POINTS = ("upload", "before-commit", "after-commit")
VICTIMS = ("worker", "node", "uploader", "warm parent")


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """In a worker, at a point of a step."""

    step: int
    rank: int
    point: str

    def __str__(self) -> str:
        return f"step {self.step} rank {self.rank} {self.point}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtNode:
    """In the agent of a node, counted from 0 as ranks are, once its workers have finished this step or a later one."""

    step: int
    node: int

    def __str__(self) -> str:
        return f"step {self.step} node {self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSave:
    """In the uploader that saves this step."""

    step: int
    point: str

    def __str__(self) -> str:
        return f"checkpoint {self.step} {self.point}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRestore:
    """In a worker of this generation, with the state loaded and nobody told."""

    generation: int
    rank: int

    def __str__(self) -> str:
        return f"generation {self.generation} rank {self.rank} restore"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRendezvous:
    """In the agent of a node of this generation, before it starts its workers."""

    generation: int
    node: int

    def __str__(self) -> str:
        return f"generation {self.generation} node {self.node} rendezvous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """Again and again, `period_s` ± `jitter_s` after the strike before. What is drawn for a strike depends on the seed, the kind of victim and the strike's number alone."""

    period_s: float
    jitter_s: float
    victim: str
    seed: int

    def __str__(self) -> str:
        jitter = f"±{_text(self.jitter_s)}" if self.jitter_s else ""
        return f"every {_text(self.period_s)}{jitter}s"

    def wait_s(self, strike: int) -> float:
        """Seconds from the strike before to this one, counted from 0."""
        return self.period_s + self.jitter_s * (2 * self._fraction(strike, "wait") - 1)

    def pick(self, strike: int, among: int) -> int:
        """Which of so many victims it is, from 0."""
        return int(self._fraction(strike, "victim") * among)

    def _fraction(self, strike: int, what: str) -> float:
        """In [0, 1)."""
        # With the victim: storms of one seed are not to strike at the same moments.
        drawn = sha256(f"{self.seed} {self.victim} {strike} {what}".encode()).digest()
        return int.from_bytes(drawn[:6], "little") / (1 << 48)


Where = AtStep | AtNode | AtSave | AtRestore | AtRendezvous | Every


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL; of a node, to its agent and all that it started."""

    def __str__(self) -> str:
        return "kill"


@dataclass(frozen=True, slots=True)
class Raise:
    def __str__(self) -> str:
        return "raise"


@dataclass(frozen=True, slots=True)
class Exit:
    code: int

    def __str__(self) -> str:
        return f"exit {self.code}"


@dataclass(frozen=True, slots=True)
class Hang:
    def __str__(self) -> str:
        return "hang"


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP, and SIGCONT so many seconds later."""

    seconds: float

    def __str__(self) -> str:
        return f"pause {_text(self.seconds)}s"


@dataclass(frozen=True, slots=True)
class Slow:
    """`steps` is None for the rest of the generation."""

    factor: float
    steps: int | None = None

    def __str__(self) -> str:
        return f"slow {_text(self.factor)}x" + ("" if self.steps is None else f" for {self.steps} steps")


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to an agent."""

    def __str__(self) -> str:
        return "terminate"


Deed = Kill | Raise | Exit | Hang | Pause | Slow | Terminate


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`text` is the line as it was written, which events quote. `twin` counts the same faults before it in the plan."""

    text: str
    where: Where
    deed: Deed
    twin: int = 0

    def __str__(self) -> str:
        match self.where, self.deed:
            case Every(victim=victim, seed=seed), _:
                return f"{self.where}: kill random {victim}, seed {seed}"
            case AtSave(), Kill():
                return f"{self.where}: kill uploader"
            case _:
                return f"{self.where}: {self.deed}"


def check_fits(faults: Iterable[Fault], *, nodes: int, nproc: int | None, uses_library: bool = True) -> None:
    """Raises UsageError for a fault that nobody can ever carry out in a run of at most `nodes` nodes of `nproc` workers (None: not known yet)."""
    for fault in faults:
        match fault.where:
            case AtNode(node=node) | AtRendezvous(node=node) if node >= nodes:
                _refuse(fault, f"a node from 0 to {nodes - 1} (--max-nodes {nodes})", str(node))
            case AtStep(rank=rank) | AtRestore(rank=rank) if nproc is not None and rank >= nodes * nproc:
                _refuse(fault, f"a rank from 0 to {nodes * nproc - 1} ({nodes} nodes of {nproc})", str(rank))
            case AtStep() | AtNode() | AtSave() | AtRestore() if not uses_library:
                found = "a script that uses none of the library and has none"
                _refuse(fault, "a recipe with steps, checkpoints and restores", found)
            case _:
                pass


def _refuse(fault: Fault, expected: str, found: str) -> None:
    raise UsageError(f"fault plan: expected {expected}, found {found} in {fault.text!r}")


def _text(number: float) -> str:
    """With up to three decimals, which is what the language has."""
    return f"{number:.3f}".rstrip("0").rstrip(".")
