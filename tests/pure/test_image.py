"""Any reader of safetensors opens an image; anything else is CheckpointDamaged."""

import json
import math

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import CheckpointDamaged, StateNotSavable
from elastic.snapshot import checksum, image

TENSORS = {
    "net.weight": torch.arange(6.0).reshape(2, 3),
    "net.half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "net.count": torch.tensor(7),
    "net.mask": torch.tensor([True, False, True]),
    "net.transposed": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
}
DOCUMENT = {"step": 3, "words": ["δ", None, 1.5, {"deep": [True]}]}


def written(tensors, document=None):
    layout = image.layout(tensors, document)
    # As in a slot, the image ends before the body does; what was there stays.
    body = bytearray(b"\xff" * (layout.size_bytes + 100))
    said = image.copy_into(layout, body)
    assert said == checksum.of_image(memoryview(body)[: layout.size_bytes])
    assert body[layout.size_bytes :] == b"\xff" * 100
    return bytes(body[: layout.size_bytes])


IMAGE = written(TENSORS, DOCUMENT)
DATA_BYTES = sum(tensor.nbytes for tensor in TENSORS.values())
HEADER_BYTES = len(IMAGE) - DATA_BYTES


def test_an_image_is_read_as_it_was_written():
    """Values, dtypes, shapes, strides and the document; the bytes of a transposed tensor are in
    row-major order, as the format wants them.
    """
    tensors, document = image.read(IMAGE)
    assert document == DOCUMENT
    assert list(tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)
        assert tensors[name].stride() == tensor.stride()


def test_the_library_of_the_format_reads_every_dtype():
    """safetensors itself opens it: values, the empty one and the 0-dimensional one included."""
    every = {str(dtype): torch.ones(3).to(dtype) for dtype in image.DTYPES} | {
        "none": torch.empty(0, 4),
        "one": torch.tensor(5),
    }
    found = safetensors.torch.load(written(every))
    assert found.keys() == every.keys()
    for name, tensor in every.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@given(
    st.dictionaries(st.text("ab/ é", min_size=1, max_size=9), st.integers(0, 9), max_size=5),
    st.text(max_size=5000),
)
def test_data_begins_on_a_page(sizes, words):
    """For any length of the header: code that maps or copies pages relies on it."""
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    data = written(tensors, words)
    head = image.LENGTH.size + image.LENGTH.unpack_from(data)[0]
    assert head % image.PAGE == 0
    assert len(data) == head + 4 * sum(sizes.values())
    assert image.read(data)[1] == words


def test_tensors_that_were_read_own_their_memory():
    """An image may be a mapped file that goes away, or be read twice: writing to one tensor changes
    nothing else.
    """
    data = bytearray(IMAGE)
    first, _ = image.read(data)
    second, _ = image.read(data)
    first["net.weight"].zero_()
    assert torch.equal(second["net.weight"], TENSORS["net.weight"])
    assert bytes(data) == IMAGE


def test_tensors_that_are_read_in_place_are_the_image():
    """No copy is made: writing to a tensor changes the image, and a tied one is the same memory."""
    shared = torch.arange(4.0)
    data = bytearray(written({"a": torch.ones(3, dtype=torch.bool), "b": shared, "c": shared}))
    tensors, _ = image.read(data, copy=False)
    tensors["b"].zero_()
    assert torch.equal(tensors["c"], torch.zeros(4))
    assert torch.equal(image.read(data)[0]["b"], torch.zeros(4))
    assert torch.equal(tensors["a"], torch.tensor([True] * 3))


@given(st.lists(st.sampled_from([torch.bool, torch.float64, torch.bfloat16, torch.int32]), max_size=8))
def test_every_tensor_begins_on_a_multiple_of_its_elements_size(dtypes):
    """In whatever order they come and however odd their lengths: only then can they be used in
    place.
    """
    tensors = {f"t{number}": torch.ones(3).to(dtype) for number, dtype in enumerate(dtypes)}
    layout = image.layout(tensors, None)
    assert all(offset % tensor.element_size() == 0 for offset, tensor in layout.places)
    taken = sorted((offset, offset + tensor.nbytes) for offset, tensor in layout.places)
    ends = [len(layout.head), *(end for _, end in taken)]
    assert [start for start, _ in taken] == ends[:-1] and ends[-1] == layout.size_bytes


def test_an_image_of_another_writer_is_read_though_its_elements_begin_anywhere():
    """Byte 1 of the data is where eight bytes of a float begin, which cannot be used in place."""
    entry = {"dtype": "F64", "shape": [2], "data_offsets": [1, 17]}
    header = {"__metadata__": METADATA, "x": entry}
    data = bytearray(with_header(header, b"!" + torch.tensor([1.5, -2.0]).double().numpy().tobytes()))
    for shift in (b"", b" "):
        text = json.dumps(header).encode() + shift
        moved = bytearray(image.LENGTH.pack(len(text)) + text + data[-17:])
        found = image.read(moved, copy=False)[0]["x"]
        assert found.tolist() == [1.5, -2.0] and found.data_ptr() % 8 == 0


def is_bounded(tensors):
    """No tensor holds more than the image gave."""
    return sum(tensor.nbytes for tensor in tensors.values()) <= len(IMAGE)


@given(st.integers(0, len(IMAGE) - 1))
def test_every_truncation_is_damage(cut):
    """A write that was torn after any byte."""
    with pytest.raises(CheckpointDamaged):
        image.read(IMAGE[:cut])


@settings(max_examples=300)
@given(st.integers(0, len(IMAGE[:HEADER_BYTES].rstrip())), st.integers(1, 255))
def test_a_flipped_byte_in_the_header_is_damage_or_harmless(place, flip):
    """The length word included, which may then announce exabytes.

    What is still an image must not exceed its bytes.
    """
    data = bytearray(IMAGE)
    data[place] ^= flip
    try:
        tensors, _ = image.read(data)
    except CheckpointDamaged:
        return
    assert is_bounded(tensors)


wild = st.none() | st.booleans() | st.floats() | st.integers() | st.integers(-2, 9) | st.text(max_size=3)
wild_json = st.recursive(
    wild, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
wild_lists = st.lists(st.integers(-2, 9) | st.integers() | st.floats(), max_size=3)


METADATA = {image.DOCUMENT: "1", image.TIES: "{}"}


def with_header(entries, data=bytes(64)):
    text = json.dumps(entries).encode()
    return image.LENGTH.pack(len(text)) + text + data


@settings(max_examples=300)
@given(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*image.NAMES, "F4"]) | wild,
            "shape": wild_lists | wild_json,
            "data_offsets": st.sampled_from([[0, 8], [8, 16], [0, 64]]) | wild_lists | wild_json,
        }
    )
)
def test_an_entry_of_any_values_is_damage_or_harmless(entry):
    """Well-formed JSON with numbers far too large, negative, not whole, or no numbers at all."""
    try:
        tensors, _ = image.read(with_header({"__metadata__": METADATA, "x": entry}))
    except CheckpointDamaged:
        return
    assert is_bounded(tensors)


@settings(max_examples=300)
@given(
    st.lists(st.integers(-1, 7) | st.integers(), max_size=3) | wild_json,
    st.sampled_from([[2, 3], [3, 1, 2], []]),
)
def test_strides_of_any_values_are_damage_or_a_permutation(strides, shape):
    """Negative, with gaps or overlaps: they would take memory that the entry does not have, or read
    beside it.
    """
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, math.prod(shape)]}
    metadata = METADATA | {image.STRIDES: json.dumps({"x": strides})}
    try:
        tensors, _ = image.read(with_header({"__metadata__": metadata, "x": entry}))
    except CheckpointDamaged:
        return
    assert tensors["x"].untyped_storage().nbytes() == math.prod(shape)


@pytest.mark.parametrize("copy", [True, False])
def test_a_view_with_gaps_is_read_row_major(copy):
    """Every second column of a matrix, and one number that is expanded to four."""
    views = {"a": torch.arange(12.0).view(3, 4)[:, ::2], "b": torch.ones(1).expand(4)}
    found, _ = image.read(bytearray(written(views)), copy=copy)
    assert torch.equal(found["a"], views["a"]) and found["a"].stride() == (2, 1)
    assert torch.equal(found["b"], views["b"]) and found["b"].stride() == (1,)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.eye(2).to_sparse(),
    ],
    ids=["complex128", "float8", "sparse"],
)
def test_a_tensor_that_the_format_does_not_know_is_refused_by_name(tensor):
    """Before a byte is written."""
    with pytest.raises(StateNotSavable, match=r"state entry net\.odd"):
        image.layout({"net.odd": tensor}, None)


@given(st.lists(st.tuples(st.sampled_from(list(image.DTYPES)), st.integers(0, 3000)), max_size=6), st.data())
def test_the_checksum_of_a_live_state_is_that_of_its_copy(kinds, data):
    """Ranks that take no snapshot compare with those that do. Words, odd ends, ties and views with
    gaps; a change after the sums were taken does not count, and any bit before it does.
    """
    tensors = {
        f"t{i}": torch.frombuffer(
            bytearray(data.draw(st.binary(min_size=8, max_size=8))) * (n + 1), dtype=dtype
        )
        for i, (dtype, n) in enumerate(kinds)
    }
    tensors |= {"tied": next(iter(tensors.values()))} if tensors else {}
    tensors["gaps"] = torch.arange(10.0)[::2]
    laid_out = image.layout(tensors, {"step": 3})
    body = bytearray(laid_out.size_bytes)
    expected = image.copy_into(laid_out, body)
    live = image.LiveChecksum(laid_out)
    if "t0" in tensors:
        assert live.hexdigest() == expected
        memory = tensors["t0"].view(torch.uint8)
        memory[memory.numel() // 2] ^= 1
        assert image.LiveChecksum(laid_out).hexdigest() != expected
    else:
        assert live.hexdigest() == expected
