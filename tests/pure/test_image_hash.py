"""Both hashes of an image are those of its tensors, in any pieces and on any number of threads."""

import hashlib
import itertools
import json
import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import CheckpointDamaged, StoreFailed
from elastic.snapshot import checksum, image, image_hash, safetensors_header
from elastic.snapshot.image_hash import ImageHash, in_memory
from elastic.system.parallel import run_all

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
    assert image_hash.digest(body) == digest_of(tensors, state)


def cut_at(body, cuts):
    """The source of these bytes, in pieces that end where it is cut, some of them empty."""

    def pieces(start, end):
        inside = sorted(min(max(cut, start), end) for cut in cuts)
        for first, last in itertools.pairwise([start, *inside, end]):
            yield body[first:last]

    return pieces


def hashes_by(source, size_bytes, threads):
    found = ImageHash(source, size_bytes)
    run_all(found.tasks(), threads)
    return found.digest(), found.parts_sha256()


@given(
    tensors_of_any_kind(), st.lists(st.integers(0, 9000), max_size=6), st.integers(1, 4), st.integers(1, 200)
)
def test_both_hashes_are_the_same_in_pieces_and_on_threads(tensors, cuts, threads, task_bytes):
    """Cut inside the length word, the header, a tensor, or between two; and shared by up to four
    threads, tensor by tensor or in groups.
    """
    body = bytes(written(tensors, {"state": {}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_hash, "TASK_BYTES", task_bytes)
        found = hashes_by(cut_at(body, cuts), len(body), threads)
    assert found == (digest_of(tensors, {}), parts_sha256_of(body))


def parts_sha256_of(body):
    """The twin: part by part, each cut out of the file."""
    header = safetensors_header.parse(body)
    places = sorted((each.start, each.end, name) for name, each in header.entries.items())
    (head_bytes,) = safetensors_header.LENGTH.unpack_from(body)
    whole = hashlib.sha256(hashlib.sha256(body[: 8 + head_bytes]).digest())
    for start, end, name in places:
        entry = header.entries[name]
        about = f"{name} {safetensors_header.DTYPES[entry.dtype][0]} {list(entry.shape)}\n"
        whole.update(hashlib.sha256(about.encode() + body[start:end]).digest())
    return whole.hexdigest()


@given(
    st.binary(max_size=300) | st.binary(max_size=300).map(lambda data: b"\x10" + bytes(7) + data),
    st.integers(0, 300),
)
def test_pieces_of_no_image_are_damage(data, cut):
    """The length word may announce more than there is, or less."""
    with pytest.raises(CheckpointDamaged):
        hashes_by(cut_at(data, [cut]), len(data), 1)


@given(tensors_of_any_kind(), st.data())
def test_the_parts_sha256_sees_every_bit_of_the_image(tensors, data):
    """The header too, of which the digest does not see all: one that still parses has another
    hash.
    """
    body = written(tensors, {"state": {}, "chain": "ab" * 32})
    before = hashes_by(in_memory(body), len(body), 1)[1]
    body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(CheckpointDamaged):
        assert hashes_by(in_memory(body), len(body), 1)[1] != before


def test_bytes_that_belong_to_no_tensor_are_damage():
    """They could be changed without a change of any part."""
    metadata = {safetensors_header.DOCUMENT: json.dumps({"state": {}}), safetensors_header.TIES: "{}"}
    for places in ([0, 8], [8, 16], [4, 12]):
        entry = {"dtype": "F64", "shape": [1], "data_offsets": places}
        text = json.dumps({"__metadata__": metadata, "x": entry}).encode()
        body = safetensors_header.LENGTH.pack(len(text)) + text + bytes(16)
        with pytest.raises(CheckpointDamaged, match="is no tensor's"):
            hashes_by(in_memory(body), len(body), 1)


def test_a_header_that_cannot_be_there_is_not_collected():
    """A bit that flips in the length word: `verify` has no memory for the whole payload."""
    body, read = bytearray(written({"x": torch.zeros(100_000)}, {"state": {}})), []
    body[5] ^= 1

    def pieces(start, end):
        for at in range(start, end, 1000):
            read.append(at)
            yield body[at : min(at + 1000, end)]

    with pytest.raises(CheckpointDamaged, match=f"is announced, {len(body)} bytes are there in all"):
        ImageHash(pieces, len(body))
    assert read == [0]


def test_a_source_that_fails_on_one_thread_ends_the_others(monkeypatch):
    """A store that does not answer: the error comes out, and the other tensors are not read on."""
    tensors = {f"x{number}": torch.zeros(1000, dtype=torch.uint8) for number in range(40)}
    body = written(tensors, {"state": {}})
    asked = []

    def pieces(start, end):
        asked.append(start)
        if len(asked) >= 3:
            raise StoreFailed("no answer")
        yield body[start:end]

    monkeypatch.setattr(image_hash, "TASK_BYTES", 1)
    with pytest.raises(StoreFailed, match="no answer"):
        hashes_by(pieces, len(body), 2)
    assert len(asked) < 40


@given(tensors_of_any_kind(), st.data())
def test_the_digest_sees_every_bit_of_the_tensors(tensors, data):
    """One bit of the data is flipped, which changes no length and no header."""
    body = written(tensors, {"state": {}})
    before = image_hash.digest(body)
    start = len(body) - sum(
        entry.end - entry.start for entry in safetensors_header.parse(body).entries.values()
    )
    if start == len(body):
        return
    body[data.draw(st.integers(start, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert image_hash.digest(body) != before
