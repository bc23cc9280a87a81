r"""Barlow Twins whose gradient is that of the whole global batch, on any number of workers.

The loss depends on the data only through sums over the global batch (`correlation_sums`). Each
shard gives its sums, the library adds them exactly, and every shard gets back dL/dsums. So there
is no collective inside the loss, and no factor of 1/ranks.

Its numbers are not the reference's: the loss is divided by the dimension D, statistics are float64
instead of the autocast type, a last partial batch is dropped, and BatchNorm (ResNet only)
normalises within a shard.

Method: Zbontar et al., arXiv 2103.03230, and the authors' implementation,
facebookresearch/barlowtwins.

    elastic-train recipes/barlow.py                         # digits, about a minute on two cores
    elastic-train recipes/barlow.py -- --data imagefolder --data-dir IMAGENET --arch resnet50 \
        --optimizer lars --global-batch 2048 --shards 32 --epochs 300 --workers 8 --amp
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision
from barlow_data import Source, load_data
from barlow_lars import LARS
from barlow_probe import probe_backbone, save_backbone
from recipe_settings import not_a_rate, option, parse, too_small
from torch import Tensor, nn

import elastic

# Peak learning rates of weights and of biases. AdamW's do not depend on the batch; LARS's are per
# 256 samples, as in the reference. The reference's rate for biases, 0.0048, was tuned on gradients
# that its all-reduce divides by 32 ranks, and for the sum over D = 8192 dimensions. For the exact
# gradient of loss / D the same update is 0.0048 / 32 * 8192 = 1.2.
DEFAULT_LRS = {"adamw": (2e-3, 2e-3), "lars": (0.2, 1.2)}
DEFAULT_PROJECTORS = {"tiny": "256-256", "resnet18": "2048-2048-2048", "resnet50": "8192-8192-8192"}
FINAL_LR_SHARE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    epochs: int = option(40, "passes over the data")
    global_batch: int = option(128, "samples per step, over all workers")
    shards: int = option(8, "fixed slices of each global batch; at least the largest number of workers")
    seed: int = option(0, "of initial weights, order and augmentation")
    data: str = option("digits", "what to train on", "digits", "cifar10", "imagefolder")
    data_dir: str = option("", "folder of cifar-10-batches-py, or of train/ and val/ with a folder per class")
    arch: str = option("tiny", "backbone", "tiny", "resnet18", "resnet50")
    projector: str = option("", "widths of the projector, such as 8192-8192-8192; empty: by --arch")
    lambd: float = option(0.005, "weight of the off-diagonal terms")
    optimizer: str = option("adamw", "LARS scales its learning rates by global batch / 256", "adamw", "lars")
    lr: float = option(0.0, "peak learning rate of the weights; 0: 0.002 for adamw, 0.2 for lars")
    lr_biases: float = option(
        0.0, "the same of biases and norms, for loss / D; 0: 0.002 for adamw, 1.2 for lars"
    )
    weight_decay: float = option(1e-4, "of the weights; biases and norms have none")
    warmup: float = option(0.1, "fraction of the run in which the learning rate rises")
    workers: int = option(0, "data loading processes per worker")
    print_every: int = option(100, "steps between two printed lines")
    amp: bool = option(False, "autocast: float16 with loss scaling on a GPU, bfloat16 on a CPU")

    @staticmethod
    def parse(arguments: Sequence[str] | None = None) -> "Settings":
        """From the command line; a value that makes no sense ends in exit code 2 and a message."""
        return parse(
            Settings, "barlow.py", "Barlow Twins on digits, CIFAR-10 or a folder of images.", arguments
        )

    def problem(self) -> str | None:
        """What is wrong with the values together, or None."""
        wrong = too_small(self, epochs=1, global_batch=1, shards=1, print_every=1, workers=0, seed=0)
        wrong = wrong or not_a_rate(self, "lr", "lr_biases", "weight_decay", "lambd")
        if wrong:
            return wrong
        if not 0 <= self.warmup < 1:
            return f"--warmup is a fraction of the run in [0, 1), not {self.warmup}"
        if self.data != "digits" and not self.data_dir:
            return f"--data {self.data} needs --data-dir, the folder where the images are"
        if self.data == "digits" and self.data_dir:
            return (
                "--data-dir is given but --data digits reads none; add --data cifar10 or --data imagefolder"
            )
        if not all(width.isdecimal() and int(width) > 0 for width in self._projector.split("-")):
            return f"--projector is a list of widths such as 256-256, not {self.projector!r}"
        return None

    @property
    def _projector(self) -> str:
        return self.projector or DEFAULT_PROJECTORS[self.arch]

    @property
    def widths(self) -> list[int]:
        """Widths of the projector's layers; the last is the dimension D of the embeddings."""
        return [int(width) for width in self._projector.split("-")]

    @property
    def peak_lrs(self) -> tuple[float, float]:
        """Peak learning rates of weights and of biases."""
        weights, biases = DEFAULT_LRS[self.optimizer]
        scale = self.global_batch / 256 if self.optimizer == "lars" else 1.0
        return (self.lr or weights) * scale, (self.lr_biases or biases) * scale


class BarlowTwins(nn.Module):
    """Backbone and projector.

    The reference's last BatchNorm, which standardises the embeddings, is part of the loss here.
    """

    def __init__(self, backbone: nn.Module, *, features: int, widths: list[int], norm: bool) -> None:
        super().__init__()
        self.backbone = backbone
        layers: list[nn.Module] = []
        for before, after in zip([features, *widths[:-2]], widths[:-1], strict=True):
            layers.append(nn.Linear(before, after, bias=not norm))
            if norm:
                layers.append(nn.BatchNorm1d(after))
            layers.append(nn.ReLU())
        # The loss is blind to a shift of an output: a bias here would get rounding noise for a
        # gradient, and AdamW would make full-sized steps of it.
        last = nn.Linear(widths[-2] if len(widths) > 1 else features, widths[-1], bias=False)
        self.projector = nn.Sequential(*layers, last)

    def forward(self, images: Tensor) -> Tensor:
        """Float images [n, channels, height, width] → embeddings [n, D] in the autocast type."""
        embeddings: Tensor = self.projector(self.backbone(images))
        return embeddings


def build_model(settings: Settings, *, channels: int, small_images: bool) -> BarlowTwins:
    """The network at initialisation, on the CPU: a function of its arguments alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if settings.arch == "tiny":
            return BarlowTwins(tiny_backbone(channels), features=64, widths=settings.widths, norm=False)
        backbone = getattr(torchvision.models, settings.arch)(zero_init_residual=True)
        features = backbone.fc.in_features
        backbone.fc = nn.Identity()
        if small_images:
            backbone.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
            backbone.maxpool = nn.Identity()
        return BarlowTwins(backbone, features=features, widths=settings.widths, norm=True)


def tiny_backbone(channels: int) -> nn.Sequential:
    """Three convolutions with GroupNorm: images [n, channels, height, width] → [n, 64]."""
    layers: list[nn.Module] = []
    for before, after, stride in ((channels, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [nn.Conv2d(before, after, 3, stride=stride, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def correlation_sums(a: Tensor, b: Tensor) -> Tensor:
    """What the loss needs of some samples: embeddings [n, D] twice → float64 [4 D + D * D].

    Float64, because a variance is the difference of two of these sums, and most digits cancel.
    """
    a, b = a.double(), b.double()
    return torch.cat([a.sum(0), b.sum(0), (a * a).sum(0), (b * b).sum(0), (a.T @ b).flatten()])


class BarlowLoss(NamedTuple):
    """Scalars, each divided by D; loss = on_diag + lambd * off_diag."""

    loss: Tensor
    on_diag: Tensor
    off_diag: Tensor


def barlow_loss(sums: Tensor, *, count: int, dim: int, lambd: float) -> BarlowLoss:
    """The loss of `count` samples from their sums [4 D + D * D].

    Variances are biased, with 1e-5 added, as in BatchNorm.
    """
    a, b, aa, bb, ab = torch.split(sums, [dim, dim, dim, dim, dim * dim])
    mean_a, mean_b = a / count, b / count
    std_a = ((aa / count - mean_a**2).clamp_min(0) + 1e-5).sqrt()
    std_b = ((bb / count - mean_b**2).clamp_min(0) + 1e-5).sqrt()
    c = (ab.view(dim, dim) / count - torch.outer(mean_a, mean_b)) / torch.outer(std_a, std_b)
    diagonal = torch.diagonal(c)
    on_diag = (diagonal - 1).pow(2).sum() / dim
    off_diag = (c - torch.diag(diagonal)).pow(2).sum() / dim
    return BarlowLoss(on_diag + lambd * off_diag, on_diag, off_diag)


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Weights; then biases and norms (ndim 1), without weight decay and LARS's adaptation."""
    weights = [p for p in model.parameters() if p.ndim != 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": weights, "weight_decay": settings.weight_decay, "adapt": True},
        {"params": biases, "weight_decay": 0.0, "adapt": False},
    ]
    if settings.optimizer == "lars":
        return LARS(groups, lr=0.0)
    return torch.optim.AdamW([{k: v for k, v in group.items() if k != "adapt"} for group in groups], lr=0.0)


def lr_share(fraction: float, *, warmup: float) -> float:
    """Share of the peak learning rate after `fraction` of the run: linear, then cosine to 0.001."""
    if fraction < warmup:
        return fraction / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (fraction - warmup) / (1 - warmup)))
    return cosine + FINAL_LR_SHARE * (1 - cosine)


def set_learning_rates(
    optimizer: torch.optim.Optimizer, fraction: float, settings: Settings
) -> tuple[float, float]:
    share = lr_share(fraction, warmup=settings.warmup)
    weights, biases = (peak * share for peak in settings.peak_lrs)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = weights, biases
    return weights, biases


def main() -> None:
    settings = Settings.parse()
    source = load_data(settings.data, Path(settings.data_dir))
    run = elastic.start(seed=settings.seed, global_batch=settings.global_batch, shards=settings.shards)
    model = build_model(settings, channels=source.channels, small_images=source.small_images).to(run.device)
    optimizer = build_optimizer(model, settings)
    on_gpu = run.device.type == "cuda"
    autocast = torch.autocast(
        run.device.type, torch.float16 if on_gpu else torch.bfloat16, enabled=settings.amp
    )
    scaler = torch.amp.GradScaler(run.device.type, enabled=settings.amp and on_gpu)
    data = run.data(source.train, epochs=settings.epochs, tail="drop", workers=settings.workers)
    state = elastic.State(model=model, optimizer=optimizer, scaler=scaler)

    def shard_sums(batch: Any) -> Tensor:
        one, other = source.views(batch)
        with autocast:
            a, b = model(one), model(other)
        return correlation_sums(a, b)

    for step in run.steps(data, state):
        lr_weights, lr_biases = set_learning_rates(optimizer, step.fraction, settings)
        sums = step.sum(shard_sums)
        losses = barlow_loss(sums, count=step.global_batch, dim=settings.widths[-1], lambd=settings.lambd)
        step.backward(losses.loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        loss, on_diag, off_diag = torch.stack(losses).tolist()
        step.log(lr_weights=lr_weights, lr_biases=lr_biases, loss=loss, on_diag=on_diag, off_diag=off_diag)
        if step.number % settings.print_every == 0:
            stats = {
                "epoch": step.epoch,
                "step": step.number,
                "lr_weights": lr_weights,
                "lr_biases": lr_biases,
            }
            run.print(json.dumps(stats | {"loss": loss}))

    if run.is_first:
        finish(run, model, settings, source)


def finish(run: elastic.Run, model: BarlowTwins, settings: Settings, source: Source) -> None:
    """Save the backbone, and probe it beside the same network at initialisation."""
    save_backbone(model.backbone, run.path(f"{settings.arch}.pth"))
    fresh = build_model(settings, channels=source.channels, small_images=source.small_images).to(run.device)
    init = probe_backbone(fresh.backbone, source, run.device)
    trained = probe_backbone(model.backbone, source, run.device)
    run.event(
        "probe",
        linear_init=init.linear,
        linear_trained=trained.linear,
        knn_init=init.knn,
        knn_trained=trained.knn,
    )
    run.print(
        f"5-shot probe | linear {init.linear:.3f} -> {trained.linear:.3f} | kNN {init.knn:.3f} -> {trained.knn:.3f}"
        " | (at initialisation -> trained)"
    )


if __name__ == "__main__":
    main()
