"""Which cells of the table of benchmarks/steady.py are measured: no value of an axis is left out.

Nothing here imports torch. The full product of the axes takes some hours on two cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from itertools import product


class Side(Enum):
    """A program that trains the cell's model."""

    OURS = "ours"
    PLAIN = "plain"  # one process, which accumulates over micro-batches
    FSDP = "FSDP2"  # fully_shard under torchrun
    DDP = "DDP"  # DistributedDataParallel under torchrun, micro-batches accumulated without syncs


MODELS = {
    "mlp64": "MLP, hidden 64",
    "mlp512": "MLP, hidden 512",
    "resnet18": "ResNet-18, 32x32",
    "resnet50": "ResNet-50, 224x224",
    "gpt": "GPT, 10 M",
    "shard": "GPT, 10 M, sharded",
    "wide": "MLP, hidden 1024",
}
SHARDED = "shard"
WIDE = "wide"  # the model of which only memory is measured
WORKERS = (1, 2, 4)
SHARDS = (1, 4)
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """shards: of one worker; a micro-batch of the others is as large as a shard."""

    model: str
    workers: int
    shards: int
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.workers}w-{self.shards}s-{self.precision}"

    @property
    def title(self) -> str:
        workers, shards = _number(self.workers, "worker"), _number(self.shards, "shard")
        each = " each" if self.workers > 1 else ""
        precision = "" if self.precision == "fp32" else f", {self.precision}"
        return f"{MODELS[self.model]}, {workers}, {shards}{each}{precision}"

    @property
    def place(self) -> tuple[int, ...]:
        """In the table."""
        model, precision = list(MODELS).index(self.model), PRECISIONS.index(self.precision)
        return model, self.workers, self.shards, precision

    @property
    def is_of_memory(self) -> bool:
        """Whether peaks of memory alone are measured, and no time."""
        return self.model == WIDE

    @property
    def aim(self) -> float | None:
        """What the ratio should be at most, beside the first of the others; None for no aim."""
        return AIMS.get(self.name)

    @property
    def sides(self) -> tuple[Side, ...]:
        """Ours first."""
        if self.model == SHARDED:
            return Side.OURS, Side.FSDP
        if self.workers > 1:
            return Side.OURS, Side.DDP
        # DistributedDataParallel with one worker: its own cost, without messages.
        return (Side.OURS, Side.PLAIN, Side.DDP) if self in WITH_ALL else (Side.OURS, Side.PLAIN)


AIMS = {
    "mlp64-1w-1s-fp32": 1.25,
    "mlp64-1w-8s-fp32": 1.15,
    "mlp512-1w-8s-fp32": 1.08,
    "mlp512-1w-4s-bf16": 1.10,
    "resnet18-1w-1s-fp32": 1.05,
    "resnet18-2w-1s-fp32": 1.02,
    "resnet18-2w-4s-fp32": 1.02,
    "resnet50-1w-1s-fp32": 1.03,
    "resnet50-2w-1s-fp32": 1.03,
    "gpt-1w-4s-fp32": 1.03,
    "gpt-2w-1s-fp32": 1.03,
    "mlp64-2w-1s-fp32": 1.3,
    "shard-2w-1s-fp32": 1.10,
    "shard-2w-4s-fp32": 1.10,
}
WITH_ALL = (
    Cell(model="mlp64", workers=1, shards=1),
    Cell(model="gpt", workers=1, shards=4),
)
CHOSEN = (
    # One worker beside plain: what a step costs without any message. Then two, of steps that are
    # long beside messages.
    Cell(model="mlp64", workers=1, shards=1),
    Cell(model="mlp64", workers=1, shards=8),
    Cell(model="mlp512", workers=1, shards=8),
    Cell(model="resnet18", workers=2, shards=1),
    Cell(model="resnet18", workers=2, shards=4),
    # Memory. With one shard there is nothing to add: that row has what the programs themselves
    # differ by.
    Cell(model=WIDE, workers=1, shards=1),
    Cell(model=WIDE, workers=1, shards=8),
    # The rest of the axes: latencies, larger models, bf16, more workers than cores.
    Cell(model="mlp64", workers=2, shards=1),
    Cell(model="gpt", workers=1, shards=4),
    Cell(model="gpt", workers=2, shards=1),
    Cell(model="shard", workers=2, shards=1),
    Cell(model="shard", workers=2, shards=4),
    Cell(model="resnet50", workers=1, shards=1),
    Cell(model="resnet50", workers=2, shards=1),
    Cell(model="resnet18", workers=1, shards=1),
    Cell(model="mlp512", workers=1, shards=4, precision="bf16"),
    Cell(model="mlp64", workers=4, shards=1),
)
EVERY = tuple(
    dict.fromkeys(
        [
            *CHOSEN,
            Cell(model=WIDE, workers=1, shards=32),
            Cell(model=WIDE, workers=1, shards=256),
            *(
                Cell(model=model, workers=workers, shards=shards, precision=precision)
                for model, workers, shards, precision in product(MODELS, WORKERS, SHARDS, PRECISIONS)
                if model != WIDE
            ),
        ]
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """left_out: cells that --all measures beside these. too_wide: more workers than GPUs."""

    cells: tuple[Cell, ...]
    left_out: tuple[Cell, ...]
    too_wide: tuple[Cell, ...]


def choose(*, takes_all: bool, only: Sequence[str], gpus: int) -> Choice:
    """only: patterns of names, as of a shell; they choose among all cells. gpus: 0 for none.

    Raises ValueError for a pattern without a cell.
    """
    for pattern in only:
        if not any(fnmatchcase(cell.name, pattern) for cell in EVERY):
            names = "\n".join(in_words(EVERY))
            raise ValueError(
                f"expected the name of a cell or a pattern, found {pattern!r}; of each model there are\n{names}"
            )
    wanted = EVERY if takes_all or only else CHOSEN
    if only:
        wanted = tuple(cell for cell in EVERY if any(fnmatchcase(cell.name, each) for each in only))
    too_wide = tuple(cell for cell in wanted if gpus and cell.workers > gpus)
    return Choice(
        cells=tuple(cell for cell in wanted if cell not in too_wide),
        left_out=() if only else tuple(cell for cell in EVERY if cell not in wanted),
        too_wide=too_wide,
    )


def in_words(cells: Sequence[Cell]) -> list[str]:
    """One line for each model: the names without the model."""
    lines: dict[str, list[str]] = {}
    for cell in cells:
        lines.setdefault(cell.model, []).append(cell.name.removeprefix(f"{cell.model}-"))
    return [f"{model}: {' '.join(names)}" for model, names in lines.items()]


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
