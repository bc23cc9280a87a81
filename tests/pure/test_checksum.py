"""Checksums differ where states differ, and do not depend on addresses and strides."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.snapshot import checksum
from elastic.snapshot.checksum import SMALL_BYTES, STRETCHES, WORD_BYTES, ImageChecksum


def of_image(image):
    return checksum.of_image(image.numpy().data)


SIZES = st.integers(1, 20_000)


@settings(deadline=None)
@given(SIZES, st.data())
def test_one_flipped_bit_anywhere_shows(size, data):
    image = torch.arange(size).to(torch.uint8)
    flipped = image.clone()
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    flipped[place] ^= 1 << bit
    assert of_image(flipped) != of_image(image)


@settings(deadline=None)
@given(SIZES, st.integers(0, 9))
def test_the_address_does_not_show(size, shift):
    """Words that do not lie on their boundaries are summed as if they did."""
    image = torch.arange(size).to(torch.uint8)
    elsewhere = torch.cat([torch.zeros(shift, dtype=torch.uint8), image])[shift:]
    assert of_image(elsewhere) == of_image(image)


@settings(deadline=None)
@given(st.integers(1, 3_000), st.data())
def test_pieces_may_be_added_in_any_order(words, data):
    """Cut anywhere between words, as tensors are, and added from the last to the first or in
    between.
    """
    image = torch.arange(words * WORD_BYTES).to(torch.uint8).numpy()
    cuts = sorted({0, words, *data.draw(st.lists(st.integers(0, words), max_size=5))})
    parts = [(a * WORD_BYTES, image[a * WORD_BYTES : b * WORD_BYTES]) for a, b in itertools.pairwise(cuts)]
    found = ImageChecksum(image.nbytes)
    for offset, part in data.draw(st.permutations(parts)):
        for at, piece in found.pieces(offset, part):
            found.add(at, piece)
    assert found.hexdigest() == checksum.of_image(image.data)


def test_a_large_image_is_cut_into_blocks_and_each_counts(monkeypatch):
    """More than 64 of the largest blocks: two whole ones change places, and one byte at the very
    end is lost.
    """
    block_bytes = 2 * SMALL_BYTES
    monkeypatch.setattr(checksum, "LARGEST_BLOCK_BYTES", block_bytes)
    image = np.arange(block_bytes * (STRETCHES + 1) // WORD_BYTES, dtype=np.uint64).view(np.uint8)
    first, second = image[:block_bytes], image[block_bytes : 2 * block_bytes]
    swapped = np.concatenate([second, first, image[2 * block_bytes :]])
    found = [checksum.of_image(each.data) for each in (image, swapped, image[:-1])]
    assert len(set(found)) == 3


def test_halves_that_changed_places_show():
    """A plain sum would not see it: every byte is there, elsewhere."""
    half = STRETCHES * WORD_BYTES * 100
    a, b = torch.zeros(half, dtype=torch.uint8), torch.ones(half, dtype=torch.uint8)
    assert of_image(torch.cat([a, b])) != of_image(torch.cat([b, a]))


def test_a_torn_copy_shows():
    """The first part of one state before the last part of another."""
    old, new = torch.randn(50_000).view(torch.uint8), torch.randn(50_000).view(torch.uint8)
    for cut in (400, 4096, 100_000, old.numel() - 400):
        torn = torch.cat([new[:cut], old[cut:]])
        assert of_image(torn) not in (of_image(old), of_image(new))
