"""Labelled images to train on and to hold out, and how a training image is varied.

Digits are shifted on the device by the batch's keyed uniform numbers; photographs are cropped and
flipped by torchvision inside `dataset[i]`, where torch's generator is keyed by the sample. Nothing
is ever downloaded.
"""

from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from barlow_data import DIGITS_FOR_TEST, IMAGENET_MEAN, IMAGENET_STD
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset
from torchvision import datasets, transforms

from elastic.errors import UsageError


class Labelled(Sized, Protocol):
    """`self[i]` is (float image [channels, side, side], int label)."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """augment: a batch of `train` → (images, labels) as the network gets them."""

    train: Labelled
    held_out: Labelled
    augment: Callable[[Any], tuple[Tensor, Tensor]]
    channels: int
    side: int
    classes: int


def load_images(name: str, folder: Path) -> Images:
    """The data set `name`; raises UsageError when its files are not in `folder`."""
    if name == "digits":
        return _digits()
    try:
        return _cifar10(folder) if name == "cifar10" else _image_folder(folder)
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"--data-dir {folder} does not hold {name} ({error}); expected cifar-10-batches-py in it,"
            " or train/<class>/<image> and val/<class>/<image>"
        ) from error


def _digits() -> Images:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    split = len(labels) - DIGITS_FOR_TEST
    return Images(
        train=TensorDataset(images[:split], labels[:split]),
        held_out=TensorDataset(images[split:], labels[split:]),
        augment=shifted,
        channels=1,
        side=8,
        classes=10,
    )


def shifted(batch: Any) -> tuple[Tensor, Tensor]:
    """Digits [n, 1, 8, 8], each moved by up to one pixel; the fraction of a pixel interpolates."""
    images, labels = batch
    shift = 0.5 * batch.uniform(2).to(images.device) - 0.25  # in halves of the image's width
    theta = torch.eye(2, 3, device=images.device).repeat(len(images), 1, 1)
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="zeros", align_corners=False), labels


def unchanged(batch: Any) -> tuple[Tensor, Tensor]:
    """What the loader made, which varied it already."""
    images, labels = batch
    return images, labels


def _cifar10(folder: Path) -> Images:
    crop = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    train = datasets.CIFAR10(str(folder), train=True, transform=_as_tensor(*crop), download=False)
    held_out = datasets.CIFAR10(str(folder), train=False, transform=_as_tensor(), download=False)
    return Images(train=train, held_out=held_out, augment=unchanged, channels=3, side=32, classes=10)


def _image_folder(folder: Path) -> Images:
    crop = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    clean = [transforms.Resize(256), transforms.CenterCrop(224)]
    train = datasets.ImageFolder(str(folder / "train"), transform=_as_tensor(*crop))
    held_out = datasets.ImageFolder(str(folder / "val"), transform=_as_tensor(*clean))
    if train.classes != held_out.classes:
        raise UsageError(f"--data-dir {folder}: the folders of train and val are not of the same classes")
    classes = len(train.classes)
    return Images(train=train, held_out=held_out, augment=unchanged, channels=3, side=224, classes=classes)


def _as_tensor(*first: Any) -> transforms.Compose:
    """A PIL image → normalised float32 [3, side, side]."""
    return transforms.Compose(
        [*first, transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    )
