"""The two views of a sample are a function of (seed, epoch, sample) alone.

Digits are augmented on the device from the batch's keyed uniform numbers; photographs by
torchvision inside `dataset[i]`, which the library calls with torch's generator keyed by the sample.
Nothing is ever downloaded, and files are trusted to stay as they are while the run lasts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image, ImageFilter
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision import datasets, transforms

from elastic.errors import UsageError

DIGITS_FOR_TEST = 500
# Uniform numbers for one view: six of geometry and contrast, one of noise for each pixel.
DIGIT_DRAWS = 6 + 64
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PROBE_CLASSES, PROBE_PER_CLASS = 100, 20  # bounds what a probe of a large data set reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`train` feeds `views`. A probe draws labels from `pool` and is scored on `test`.

    `pool` and `test` give (float image [channels, height, width], int label).
    """

    train: Dataset[Any]
    views: Callable[[Any], tuple[Tensor, Tensor]]
    pool: Dataset[Any]
    test: Dataset[Any]
    channels: int
    small_images: bool  # a ResNet then gets the 3x3 stem without pooling


def load_data(name: str, folder: Path) -> Source:
    """The data set `name`; raises UsageError when its files are not in `folder`."""
    if name == "digits":
        return _digits()
    if not folder.is_dir():
        raise UsageError(
            f"--data-dir {folder} is not a folder that can be read here; every node needs it at this path"
        )
    return _cifar10(folder) if name == "cifar10" else _image_folder(folder)


def _digits() -> Source:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:-DIGITS_FOR_TEST], labels[:-DIGITS_FOR_TEST])
    test = TensorDataset(images[-DIGITS_FOR_TEST:], labels[-DIGITS_FOR_TEST:])
    return Source(train=train, views=digit_views, pool=train, test=test, channels=1, small_images=True)


def digit_views(batch: Any) -> tuple[Tensor, Tensor]:
    """Two independently drawn views of a batch of digits, each [n, 1, 8, 8]."""
    images, _ = batch
    draws = batch.uniform(2 * DIGIT_DRAWS).to(images.device)
    return augment_digits(images, draws[:, :DIGIT_DRAWS]), augment_digits(images, draws[:, DIGIT_DRAWS:])


def augment_digits(images: Tensor, draws: Tensor) -> Tensor:
    """Images [n, 1, 8, 8] in [0, 1], uniform numbers [n, 70] in [0, 1) → images of that shape.

    Rotation within 15 degrees, size within 20 %, shear within 0.2, shift within a quarter of half
    the width, contrast within 40 %, and noise of standard deviation 0.1, which is uniform too.
    """
    signed = 2 * draws - 1
    angle, size, shear, shift_x, shift_y, contrast = signed[:, :6].unbind(1)
    theta = _affine(
        torch.deg2rad(15 * angle), 1 + 0.2 * size, 0.2 * shear, 0.25 * torch.stack([shift_x, shift_y], 1)
    )
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, padding_mode="zeros", align_corners=False)
    noise = 0.1 * 3**0.5 * signed[:, 6:].reshape(images.shape)
    return moved * (1 + 0.4 * contrast).view(-1, 1, 1, 1) + noise


def _affine(angle: Tensor, size: Tensor, shear: Tensor, shift: Tensor) -> Tensor:
    """[n] each, shift [n, 2] → matrices [n, 2, 3] that map output positions to input positions."""
    cos, sin = angle.cos() * size, angle.sin() * size
    rows = torch.stack([cos, cos * shear - sin, shift[:, 0], sin, sin * shear + cos, shift[:, 1]], 1)
    return rows.view(-1, 2, 3)


def _cifar10(folder: Path) -> Source:
    two, clean = TwoViews(32), _clean(32)

    def read(*, train: bool, transform: Callable[[Image.Image], Any]) -> Any:
        return datasets.CIFAR10(str(folder), train=train, transform=transform, download=False)

    try:
        train, pool, test = (
            read(train=True, transform=two),
            read(train=True, transform=clean),
            read(train=False, transform=clean),
        )
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"--data-dir {folder} holds no intact CIFAR-10 ({error}); expected the folder cifar-10-batches-py in it, with "
            "data_batch_1 to data_batch_5, test_batch and batches.meta of cifar-10-python.tar.gz, unpacked"
        ) from error
    return _photographs(train, pool, test, small_images=True)


def _image_folder(folder: Path) -> Source:
    two, clean = TwoViews(224), _clean(224)
    try:
        train = datasets.ImageFolder(str(folder / "train"), transform=two)
        pool = datasets.ImageFolder(str(folder / "train"), transform=clean)
        test = datasets.ImageFolder(str(folder / "val"), transform=clean)
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"--data-dir {folder} has not ImageNet's layout ({error}); expected train/<class>/<image> and "
            "val/<class>/<image> in it"
        ) from error
    if train.classes != test.classes:
        raise UsageError(
            f"--data-dir {folder}: train has {len(train.classes)} classes and val {len(test.classes)}, or under other "
            "names; the folders of the classes must be the same in both"
        )
    return _photographs(train, pool, test, small_images=False)


def _photographs(train: Any, pool: Any, test: Any, *, small_images: bool) -> Source:
    return Source(
        train=train,
        views=photograph_views,
        pool=Subset(pool, some_of_each(pool.targets)),
        test=Subset(test, some_of_each(test.targets)),
        channels=3,
        small_images=small_images,
    )


def photograph_views(batch: Any) -> tuple[Tensor, Tensor]:
    """The two views that the loader made, each [n, 3, height, width]."""
    (one, other), _ = batch
    return one, other


def some_of_each(labels: Sequence[int]) -> list[int]:
    """Indices of the first 20 samples of each of the first 100 classes, in order."""
    chosen, seen = [], dict.fromkeys(range(PROBE_CLASSES), 0)
    for index, label in enumerate(labels):
        if seen.get(label, PROBE_PER_CLASS) < PROBE_PER_CLASS:
            seen[label] += 1
            chosen.append(index)
    return chosen


class TwoViews:
    """The paper's two augmentations: one always blurs, the other seldom blurs and may solarize."""

    def __init__(self, size: int) -> None:
        self.one = _augmentation(size, blur=1.0, solarize=0.0)
        self.other = _augmentation(size, blur=0.1, solarize=0.2)

    def __call__(self, image: Image.Image) -> tuple[Tensor, Tensor]:
        """PIL image → two normalised float32 tensors [3, size, size]; torch's generator draws."""
        return self.one(image), self.other(image)


def _augmentation(size: int, *, blur: float, solarize: float) -> transforms.Compose:
    jitter = transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(0.5),
            transforms.RandomApply([jitter], p=0.8),
            transforms.RandomGrayscale(0.2),
            transforms.RandomApply([Blur(size)], p=blur),
            transforms.RandomSolarize(128, p=solarize),
            *_to_tensor(),
        ]
    )


def _clean(size: int) -> transforms.Compose:
    crop = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)] if size > 32 else []
    return transforms.Compose([*crop, *_to_tensor()])


def _to_tensor() -> list[Any]:
    return [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]


class Blur(torch.nn.Module):
    """Gaussian blur of a PIL image: radius 0.1 to 2 pixels for side 224, else in proportion."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = size / 224

    def forward(self, image: Image.Image) -> Image.Image:
        radius = self.scale * float(torch.empty(()).uniform_(0.1, 2.0))
        return image.filter(ImageFilter.GaussianBlur(radius))
