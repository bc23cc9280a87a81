"""Views are functions of their random numbers; loaders name what is missing on the disk."""

import hashlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import barlow_data
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10

from elastic.errors import UsageError

DRAWS = barlow_data.DIGIT_DRAWS


class Batch:
    """What the library gives, with numbers that the test chose."""

    def __init__(self, data: object, draws: Tensor | None = None) -> None:
        self._data = data
        self._draws = draws

    def __iter__(self) -> Iterator[object]:
        return iter(self._data)  # type: ignore[call-overload, no-any-return]

    def uniform(self, count: int) -> Tensor:
        assert self._draws is not None and self._draws.shape[1] == count
        return self._draws


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31))
def test_augmented_digit_is_a_function_of_its_own_numbers(seed: int) -> None:
    """The same sample alone, and in a batch after other draws of the global generator, must come
    out the same.
    """
    generator = torch.Generator().manual_seed(seed)
    images, draws = torch.rand(5, 1, 8, 8, generator=generator), torch.rand(5, DRAWS, generator=generator)
    together = barlow_data.augment_digits(images, draws)
    torch.rand(3)
    alone = barlow_data.augment_digits(images[2:3], draws[2:3])
    assert together.shape == images.shape and together.dtype == torch.float32
    torch.testing.assert_close(together[2:3], alone, rtol=0, atol=1e-6)


def test_middle_numbers_leave_a_digit_as_it_is() -> None:
    """At 0.5 there is no rotation, shift or noise: an augmentation that is off-centre fails."""
    images = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(barlow_data.augment_digits(images, torch.full((3, DRAWS), 0.5)), images)


@pytest.mark.parametrize("draw", range(DRAWS))
def test_every_number_changes_the_digit(draw: int) -> None:
    image, draws = torch.rand(1, 1, 8, 8), torch.full((1, DRAWS), 0.5)
    draws[0, draw] = 0.9
    assert not torch.allclose(barlow_data.augment_digits(image, draws), image, atol=1e-4)


def test_noise_has_the_standard_deviation_that_is_promised() -> None:
    draws = torch.rand(500, DRAWS, generator=torch.Generator().manual_seed(0))
    noise = barlow_data.augment_digits(torch.zeros(500, 1, 8, 8), draws)
    assert float(noise.std()) == pytest.approx(0.1, rel=0.05)


def test_two_views_of_a_digit_use_different_numbers() -> None:
    digits = barlow_data.load_data("digits", Path())
    images, labels = next(iter(DataLoader(digits.train, batch_size=4)))
    draws = torch.rand(4, 2 * DRAWS)
    one, other = digits.views(Batch([images, labels], draws))
    assert one.shape == other.shape == (4, 1, 8, 8)
    assert not torch.equal(one, other)
    assert torch.equal(other, barlow_data.augment_digits(images, draws[:, DRAWS:]))


def test_test_digits_are_not_trained() -> None:
    digits = barlow_data.load_data("digits", Path())
    sizes = [len(part) for part in (digits.train, digits.pool, digits.test)]  # type: ignore[arg-type]
    assert sizes == [1297, 1297, 500]


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    numbers = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


@pytest.mark.parametrize("size", [32, 224])
def test_photograph_views_are_a_function_of_the_generator(size: int) -> None:
    """The library keys torch's generator for each sample; a transform that drew elsewhere would
    differ here.
    """
    views = barlow_data.TwoViews(size)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(views(picture(0)))
    assert all(view.shape == (3, size, size) and view.dtype == torch.float32 for view in drawn[0])
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_the_two_augmentations_are_asymmetric() -> None:
    """Blur always and solarize never in the one; seldom and sometimes in the other."""
    views = barlow_data.TwoViews(224)
    chances = [
        (view.transforms[4].p, view.transforms[5].p, type(view.transforms[4].transforms[0]))
        for view in (views.one, views.other)
    ]
    assert chances == [(1.0, 0.0, barlow_data.Blur), (0.1, 0.2, barlow_data.Blur)]


def image_folder(root: Path, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    for part, count in (("train", 24), ("val", 3)):
        for label in classes:
            folder = root / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                picture(number).save(folder / f"{number}.png")
    return root


def test_image_folder_is_read(tmp_path: Path) -> None:
    source = barlow_data.load_data("imagefolder", image_folder(tmp_path))
    batch = next(iter(DataLoader(source.train, batch_size=4)))
    one, other = source.views(Batch(batch))
    assert one.shape == other.shape == (4, 3, 224, 224)
    image, label = source.pool[47 - 8]
    assert image.shape == (3, 224, 224) and label == 1
    assert len(source.train) == 48 and len(source.pool) == 40 and len(source.test) == 6  # type: ignore[arg-type]
    assert (source.channels, source.small_images) == (3, False)


def test_missing_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder that can be read"):
        barlow_data.load_data("imagefolder", tmp_path / "nowhere")


def test_folder_without_val_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    picture(0).save(tmp_path / "train" / "cat" / "0.png")
    with pytest.raises(UsageError, match="val/<class>/<image>"):
        barlow_data.load_data("imagefolder", tmp_path)


def test_val_with_other_classes_is_a_usage_error(tmp_path: Path) -> None:
    """Labels are places in the sorted list of folders: other folders would silently mean other
    classes.
    """
    image_folder(tmp_path)
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "emu")
    with pytest.raises(UsageError, match="must be the same in both"):
        barlow_data.load_data("imagefolder", tmp_path)


@pytest.fixture
def cifar_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small batches in CIFAR-10's format; torchvision's list of checksums is that of these files,
    and is really checked.
    """
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    sums = {}
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]):
        if name == "batches.meta":
            content: dict[str, object] = {"label_names": [str(i) for i in range(10)]}
        else:
            pixels = np.random.default_rng(number).integers(0, 256, (20, 3072), dtype=np.uint8)
            content = {"data": pixels, "labels": [i % 10 for i in range(20)]}
        (folder / name).write_bytes(pickle.dumps(content))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(
        CIFAR10, "train_list", [[f"data_batch_{i}", sums[f"data_batch_{i}"]] for i in range(1, 6)]
    )
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": sums["batches.meta"]})
    return tmp_path


def test_cifar10_is_read(cifar_folder: Path) -> None:
    source = barlow_data.load_data("cifar10", cifar_folder)
    batch = next(iter(DataLoader(source.train, batch_size=4)))
    one, _ = source.views(Batch(batch))
    assert one.shape == (4, 3, 32, 32)
    assert len(source.train) == 100 and len(source.pool) == 100 and len(source.test) == 20  # type: ignore[arg-type]
    assert source.test[3][0].shape == (3, 32, 32) and source.test[3][1] == 3
    assert source.small_images


def test_damaged_cifar10_is_a_usage_error(cifar_folder: Path) -> None:
    """One flipped byte: the loader must refuse it before a run starts."""
    path = cifar_folder / "cifar-10-batches-py" / "data_batch_3"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no intact CIFAR-10"):
        barlow_data.load_data("cifar10", cifar_folder)


def test_a_probe_reads_a_bounded_part_of_a_large_data_set() -> None:
    labels = [index % 300 for index in range(30_000)]
    chosen = barlow_data.some_of_each(labels)
    assert len(chosen) == 100 * 20 and {labels[index] for index in chosen} == set(range(100))
