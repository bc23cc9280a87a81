"""Views are functions of their random numbers; loaders name what is missing on the disk."""

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


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    numbers = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(numbers)


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


def test_val_with_other_classes_is_a_usage_error(tmp_path: Path) -> None:
    """Labels are places in the sorted list of folders: other folders would silently mean other
    classes.
    """
    image_folder(tmp_path)
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "emu")
    with pytest.raises(UsageError, match="must be the same in both"):
        barlow_data.load_data("imagefolder", tmp_path)
