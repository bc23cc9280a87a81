"""What the programs of benchmarks/steady.py train: the same models on the same noise.

Sizes are chosen so that a step takes a millisecond (MLP, hidden 64) to a second (ResNet-50) on one
core. Labels are noise too: nothing is learnt.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import TensorDataset

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 2048, 64, 384, 5, 6


def mlp(hidden: int, layers: int = 7) -> nn.Sequential:
    widths = [64, *[hidden] * (layers - 1)]
    blocks = [block for before, after in pairwise(widths) for block in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Linear(hidden, 10))


class Gpt(nn.Module):
    """Ten million parameters. Returns logits [batch, context, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [batch, context]."""
        found = self.blocks(self.embed(tokens) + self.places, mask=self.mask, is_causal=True)
        logits: Tensor = self.head(found)
        return logits


def resnet(name: str, classes: int) -> nn.Module:
    import torchvision  # takes seconds, and the other models do without

    model: nn.Module = torchvision.models.get_model(name, num_classes=classes)
    return model


def vectors(count: int, noise: torch.Generator) -> list[Tensor]:
    return [torch.randn(count, 64, generator=noise), torch.randint(0, 10, (count,), generator=noise)]


def images(size: int) -> Callable[[int, torch.Generator], list[Tensor]]:
    def make(count: int, noise: torch.Generator) -> list[Tensor]:
        pixels = torch.randn(count, 3, size, size, generator=noise)
        return [pixels, torch.randint(0, 10, (count,), generator=noise)]

    return make


def tokens(count: int, noise: torch.Generator) -> list[Tensor]:
    text = torch.randint(0, VOCABULARY, (count, CONTEXT + 1), generator=noise)
    return [text[:, :-1].clone(), text[:, 1:].clone()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """samples: of a shard. steps: of an epoch. noise: tensors of so many samples."""

    make: Callable[[], nn.Module]
    noise: Callable[[int, torch.Generator], list[Tensor]]
    samples: int
    steps: int

    def model(self) -> nn.Module:
        """The same weights in each program and on each rank."""
        torch.manual_seed(0)
        return self.make()

    def dataset(self, shards: int) -> TensorDataset:
        """shards: of all workers together."""
        count = self.steps * shards * self.samples
        return TensorDataset(*self.noise(count, torch.Generator().manual_seed(0)))

    def gradient_bytes(self) -> int:
        with torch.device("meta"):
            return sum(each.numel() * each.element_size() for each in self.make().parameters())


WORKLOADS = {
    "mlp64": Workload(make=lambda: mlp(64), noise=vectors, samples=8, steps=500),
    "mlp512": Workload(make=lambda: mlp(512), noise=vectors, samples=8, steps=500),
    "resnet18": Workload(make=lambda: resnet("resnet18", 10), noise=images(32), samples=8, steps=100),
    "resnet50": Workload(make=lambda: resnet("resnet50", 10), noise=images(224), samples=2, steps=20),
    "gpt": Workload(make=Gpt, noise=tokens, samples=2, steps=100),
    "shard": Workload(make=Gpt, noise=tokens, samples=2, steps=100),
    "wide": Workload(make=lambda: mlp(1024, layers=10), noise=vectors, samples=1, steps=100),
}


def shard(model: nn.Module, fully_shard: Callable[[nn.Module], object]) -> None:
    assert isinstance(model, Gpt)
    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(model, Gpt):
        return torch.optim.AdamW(model.parameters(), lr=3e-4)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor, precision: str) -> Tensor:
    """The mean over a shard or micro-batch. precision: fp32, or bf16 by autocast."""
    casts: AbstractContextManager[object] = nullcontext()
    if precision == "bf16":
        casts = torch.autocast(inputs.device.type, torch.bfloat16)
    with casts:
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
