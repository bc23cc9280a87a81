"""The digest from an image's bytes is that of its tensors, and headers are believed as far as bytes
go.
"""

import hashlib
import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import CheckpointDamaged
from elastic.snapshot import checksum, image, safetensors_header

STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.text("ab.' é(values)", min_size=1, max_size=12)


def digest_of(tensors, document):
    """The twin: from tensors, one after the other."""
    entries = {}
    for name, tensor in tensors.items():
        digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        entries[name] = digest.hexdigest()
    for name, value in document.items():
        entries[f"{name} (values)"] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    return hashlib.sha256(json.dumps(sorted(entries.items())).encode()).hexdigest()


@st.composite
def tensors_of_any_kind(draw):
    """Any bits of any dtype, empty and 0-dimensional ones, transposed ones, and names that share
    one memory.
    """
    tensors = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=6)):
        if tensors and draw(st.booleans()):
            tensors[name] = tensors[draw(st.sampled_from(sorted(tensors)))]
            continue
        dtype = draw(st.sampled_from(list(image.DTYPES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = math.prod(shape) * dtype.itemsize
        data = draw(st.binary(min_size=size, max_size=size))
        if dtype is torch.bool:
            data = bytes(byte & 1 for byte in data)
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(shape)
        tensors[name] = tensor.T if tensor.dim() == 2 and draw(st.booleans()) else tensor
    return tensors


def written(tensors, document):
    layout = image.layout(tensors, document)
    body = bytearray(layout.size_bytes)
    assert image.copy_into(layout, body) == checksum.of_image(memoryview(body))
    return body


@given(tensors_of_any_kind(), st.dictionaries(NAMES, STATES, max_size=3))
def test_the_digest_from_bytes_is_that_of_the_tensors(tensors, state):
    """Whatever is in the state, NaN and minus zero included, and wherever the image puts it."""
    body = written(tensors, {"state": state, "step": 3})
    assert safetensors_header.digest(body) == digest_of(tensors, state)


@given(tensors_of_any_kind(), st.lists(st.integers(0, 9000), max_size=6))
def test_the_digest_is_the_same_in_pieces(tensors, cuts):
    """Cut inside the length word, the header, a tensor, or between two; some pieces are empty."""
    body = bytes(written(tensors, {"state": {}}))
    found = safetensors_header.StateDigest(len(body))
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for start, end in itertools.pairwise(places):
        found.add(body[start:end])
    assert found.hexdigest() == safetensors_header.digest(body)


@given(
    st.binary(max_size=300) | st.binary(max_size=300).map(lambda data: b"\x10" + bytes(7) + data),
    st.integers(0, 300),
)
def test_pieces_of_no_image_are_damage(data, cut):
    """The length word may announce more than there is, or less."""
    found = safetensors_header.StateDigest(len(data))

    def digest():
        found.add(data[:cut])
        found.add(data[cut:])
        return found.hexdigest()

    with pytest.raises(CheckpointDamaged):
        digest()


@given(tensors_of_any_kind(), st.data())
def test_the_digest_sees_every_bit_of_the_tensors(tensors, data):
    """One bit of the data is flipped, which changes no length and no header."""
    body = written(tensors, {"state": {}})
    before = safetensors_header.digest(body)
    start = len(body) - sum(
        entry.end - entry.start for entry in safetensors_header.parse(body).entries.values()
    )
    if start == len(body):
        return
    body[data.draw(st.integers(start, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert safetensors_header.digest(body) != before


def with_header(header, data=bytes(64)):
    text = json.dumps(header).encode()
    return safetensors_header.LENGTH.pack(len(text)) + text + data


def metadata(ties=None, document=None):
    return {
        safetensors_header.DOCUMENT: json.dumps(document or {"state": {}}),
        safetensors_header.TIES: json.dumps(ties or {}),
    }


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}


def test_an_entry_that_its_bytes_bear_out_is_read():
    """What the attacks below are changes of."""
    found = safetensors_header.parse(with_header({"__metadata__": metadata({"y": "x"}), "x": GOOD}))
    assert found.entries["x"].shape == (2, 3)
    assert found.entries["x"].end - found.entries["x"].start == 24


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2, 4]},
        {"shape": [2, 2]},
        {"shape": [-2, -3]},
        {"shape": [2.0, 3]},
        {"shape": [True, 6]},
        {"shape": [2**64, 0], "data_offsets": [8, 8]},
        {"shape": 6},
        {"dtype": "F64"},
        {"dtype": "F5"},
        {"data_offsets": [8, 31]},
        {"data_offsets": [48, 72]},
        {"data_offsets": [-24, 0]},
        {"data_offsets": [32, 8]},
        {"data_offsets": [72, 72], "shape": [0]},
        {"data_offsets": [8, 8], "shape": [2**20]},
        {"data_offsets": [8.0, 32.0]},
        {"data_offsets": [8]},
        {"data_offsets": None},
    ],
)
def test_an_entry_that_its_bytes_do_not_bear_out_is_damage(change):
    """64 bytes of data: each change announces bytes that are not there, or too many or too few.

    Python counts negative offsets from the end, and cuts a slice at the end: both would be read.
    """
    with pytest.raises(CheckpointDamaged):
        safetensors_header.parse(with_header({"__metadata__": metadata(), "x": GOOD | change}))


@pytest.mark.parametrize("ties", [{"y": "z"}, {"x": "x"}, {"y": "y"}, {"y": ["x"]}, ["x"], 3])
def test_a_tie_to_nothing_is_damage(ties):
    """To a name that is not stored, of a name that is, to itself, or no tie at all."""
    with pytest.raises(CheckpointDamaged):
        safetensors_header.parse(with_header({"__metadata__": metadata(ties), "x": GOOD}))


@pytest.mark.parametrize("document", [{"step": 3}, {"state": [1]}, [1], "state"])
def test_an_image_without_a_state_has_no_digest(document):
    """Another program's safetensors file must not get one."""
    with pytest.raises(CheckpointDamaged, match="lacks a state"):
        safetensors_header.digest(with_header({"__metadata__": metadata(document=document), "x": GOOD}))
