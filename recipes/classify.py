"""A classifier of images, with all that training one takes: schedule, validation, best weights.

The validation accuracy is a sum over fixed blocks of the held-out images, so it has the same bits
at every world size, and what follows from it (the best weights, early stopping) does too. With
`--arch mlp --optimizer sgd` this is synchronous SGD on partitioned data, the textbook case.

    elastic-train recipes/classify.py                       # digits, about a minute on two cores
    elastic-train recipes/classify.py -- --data cifar10 --data-dir CIFAR --arch resnet18 \
        --optimizer sgd --lr 0.1 --weight-decay 5e-4 --epochs 100 --global-batch 512 --workers 4
"""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from classify_data import Images, load_images
from recipe_settings import not_a_rate, option, parse, too_small
from torch import Tensor, nn

import elastic


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    epochs: int = option(20, "passes over the training images")
    global_batch: int = option(128, "samples per step, over all workers")
    shards: int = option(8, "fixed slices of each global batch; at least the largest number of workers")
    seed: int = option(0, "of initial weights, order and augmentation")
    data: str = option("digits", "what to train on", "digits", "cifar10", "imagefolder")
    data_dir: str = option("", "folder of cifar-10-batches-py, or of train/ and val/ with a folder per class")
    arch: str = option("small", "network", "mlp", "small", "resnet18", "resnet50")
    optimizer: str = option("adamw", "how weights are updated", "adamw", "sgd")
    lr: float = option(0.0, "peak learning rate; 0: 0.003 for adamw, 0.1 for sgd")
    weight_decay: float = option(0.01, "of the weights; biases and norms have none")
    warmup: float = option(0.05, "fraction of the run in which the learning rate rises")
    label_smoothing: float = option(0.1, "share of the target that goes to all classes alike")
    patience: int = option(8, "stop after so many epochs without a better validation accuracy")
    workers: int = option(0, "data loading processes per worker")

    @staticmethod
    def parse(arguments: Sequence[str] | None = None) -> "Settings":
        """From the command line; a value that makes no sense ends in exit code 2 and a message."""
        return parse(Settings, "classify.py", "Classify digits, CIFAR-10 or a folder of images.", arguments)

    def problem(self) -> str | None:
        """What is wrong with the values together, or None."""
        if (self.data == "digits") == bool(self.data_dir):
            return "--data cifar10 and imagefolder need --data-dir, and --data digits reads none"
        if not (0 <= self.warmup < 1 and 0 <= self.label_smoothing < 1):
            return "--warmup and --label-smoothing are fractions in [0, 1)"
        wrong = too_small(self, epochs=1, global_batch=1, shards=1, patience=1, workers=0, seed=0)
        return wrong or not_a_rate(self, "lr", "weight_decay")

    @property
    def peak_lr(self) -> float:
        return self.lr or {"adamw": 3e-3, "sgd": 0.1}[self.optimizer]


def build_model(settings: Settings, images: Images) -> nn.Module:
    """Float images [n, channels, side, side] → scores [n, classes]."""
    if settings.arch == "mlp":
        pixels = images.channels * images.side**2
        hidden = [nn.Linear(pixels, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(128, images.classes))
    if settings.arch == "small":
        return small_network(images.channels, images.classes)
    network: nn.Module = getattr(torchvision.models, settings.arch)(num_classes=images.classes)
    if images.side <= 32:  # a stem for small images, as the ResNet paper has for CIFAR-10
        network.conv1 = nn.Conv2d(images.channels, 64, kernel_size=3, padding=1, bias=False)
        network.maxpool = nn.Identity()
    return network


def small_network(channels: int, classes: int) -> nn.Sequential:
    """Three convolutions with BatchNorm and dropout before the last layer."""
    layers: list[nn.Module] = []
    for before, after, stride in ((channels, 32, 1), (32, 64, 2), (64, 128, 2)):
        convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1))
    return nn.Sequential(*layers, *pool, nn.Linear(128, classes))


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Weights; then biases and norms (ndim 1), without weight decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim != 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=0.0)


def lr_share(fraction: float, warmup: float) -> float:
    """Share of the peak learning rate after `fraction` of the run: linear, then cosine to 0."""
    if fraction < warmup:
        return fraction / warmup
    return 0.5 * (1 + math.cos(math.pi * (fraction - warmup) / (1 - warmup)))


def validate(run: elastic.Run, model: nn.Module, images: Images) -> float:
    """The share of held-out images that the model gets right, the same bits at every world size."""

    def count_correct(batch: elastic.Batch) -> Tensor:
        inputs, labels = batch
        correct: Tensor = (model(inputs).argmax(1) == labels).sum()
        return correct

    model.eval()
    correct = run.evaluate(images.held_out, count_correct)
    model.train()
    return float(correct) / len(images.held_out)


def main() -> None:
    settings = Settings.parse()
    images = load_images(settings.data, Path(settings.data_dir))
    run = elastic.start(seed=settings.seed, global_batch=settings.global_batch, shards=settings.shards)
    model = build_model(settings, images).to(run.device)
    best = copy.deepcopy(model).requires_grad_(False)  # the weights of the best epoch so far
    values = elastic.Values(accuracy=0.0, epoch=0)  # of that epoch
    optimizer = build_optimizer(model, settings)
    data = run.data(images.train, epochs=settings.epochs, workers=settings.workers)
    state = elastic.State(model=model, optimizer=optimizer, best=best, values=values)
    loss_function = nn.CrossEntropyLoss(label_smoothing=settings.label_smoothing)

    def loss_of(batch: elastic.Batch) -> Tensor:
        inputs, labels = images.augment(batch)
        loss: Tensor = loss_function(model(inputs), labels)
        return loss

    for step in run.steps(data, state):
        lr = settings.peak_lr * lr_share(step.fraction, settings.warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = step.mean_loss(loss_of)
        optimizer.step()
        step.log(loss=loss, lr=lr)
        if step.number % data.steps_per_epoch == 0:
            accuracy = validate(run, model, images)
            step.log(accuracy=accuracy)
            run.print(json.dumps({"epoch": step.epoch, "loss": loss, "accuracy": accuracy}))
            if accuracy > values.accuracy:
                values.accuracy, values.epoch = accuracy, step.epoch
                best.load_state_dict(model.state_dict())
            if step.epoch - values.epoch >= settings.patience:
                run.stop(f"no better accuracy in {settings.patience} epochs")

    run.print(f"best validation accuracy {values.accuracy:.4f}, in epoch {values.epoch}")
    if run.is_first:
        torch.save(best.state_dict(), run.path("best.pth"))


if __name__ == "__main__":
    main()
