"""One kind of hidden state: a recipe that keeps something outside its State, and its innocent twin.

kinds.diff has them all, each as the change that makes the twin out of the wrong recipe, under a
line `@@ its name @@ where it acts`. The recipes follow PRELUDE: a run of three epochs of six steps,
of four shards each.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

HEAD = "@@ "

PRELUDE = """\
import elastic
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, TensorDataset

run = elastic.start(seed=0, global_batch=8, shards=4)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
samples = TensorDataset(torch.linspace(-1, 1, 192).reshape(48, 4), torch.linspace(0, 1, 48))
EPOCHS = 3


def loss_of(batch):
    inputs, targets = batch.data
    return mse_loss(model(inputs).squeeze(1), targets)

"""


class Acts(Enum):
    """Where the hidden state changes a loss, a gradient or the State."""

    STEP = "in a step"  # of those soon after the beginning
    EPOCH = "after an epoch's end"
    WORLD = "at another world size"
    RESUME = "at a resume"  # alone: not where the same command begins again at once
    ADDRESS = "by address"
    NEVER = "never"  # what is kept beside is wrong, and training goes on as if it were not


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """name: of at most 60 characters. wrong, twin: what follows PRELUDE."""

    name: str
    acts: Acts
    wrong: str
    twin: str

    @property
    def recipes(self) -> dict[str, str]:
        return {"wrong": PRELUDE + self.wrong, "twin": PRELUDE + self.twin}


def read_kinds(path: Path) -> tuple[Kind, ...]:
    """Raises ValueError for a line that is neither in a recipe nor a head."""
    kinds = []
    for part in path.read_text().removeprefix(HEAD).split(f"\n{HEAD}"):
        head, *lines = part.rstrip("\n").split("\n")
        name, _, acts = head.partition(f" {HEAD}")
        if strange := [line for line in lines if line[:1] not in ("", " ", "-", "+")]:
            raise ValueError(f"{name}: expected ' ', '-' or '+' before {strange[0]!r}")
        wrong, twin = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != other) for other in "+-")
        kinds.append(Kind(name=name, acts=Acts(acts), wrong=wrong, twin=twin))
    return tuple(kinds)
