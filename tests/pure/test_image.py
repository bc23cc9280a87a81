"""Any reader of safetensors opens an image, its hashes see every bit of it, and anything else is
CheckpointDamaged.
"""

import hashlib
import itertools
import json
from contextlib import suppress

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from saved_state import any_tensors

from elastic.errors import CheckpointDamaged, StateNotSavable
from elastic.snapshot import checksum, image, image_hash, safetensors_header
from elastic.snapshot.checksum import SMALL_BYTES, STRETCHES
from elastic.snapshot.image_hash import ImageHash, in_memory, run_all

NAMES = st.text("ab.' é(values)", min_size=1, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)
STATES = st.dictionaries(NAMES, JSON, max_size=3)


@st.composite
def tensors(draw):
    """Any bits of any dtype, empty and 0-dimensional ones, transposed ones, views with gaps, and
    names that share one memory.
    """
    found = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=6)):
        if found and draw(st.booleans()):
            found[name] = found[draw(st.sampled_from(sorted(found)))]
            continue
        tensor = draw(any_tensors())
        if tensor.dim() == 2:
            tensor = draw(st.sampled_from([tensor, tensor.T, tensor[:, ::2]]))
        found[name] = tensor
    return found


def written(found, document):
    """As in a slot, the image ends before the body does; what was there stays."""
    layout = image.layout(found, document)
    body = bytearray(b"\xff" * (layout.size_bytes + 100))
    said = image.copy_into(layout, body)
    assert said == checksum.of_image(memoryview(body)[: layout.size_bytes])
    assert said == image.LiveChecksum(layout).hexdigest()
    assert body[layout.size_bytes :] == b"\xff" * 100
    return body[: layout.size_bytes]


def bits(tensor):
    return tensor.dtype, tensor.shape, bytes(image.tensor_bytes(tensor).numpy())


@given(tensors(), st.fixed_dictionaries({"state": STATES, "words": st.text(max_size=5000)}))
@example({str(dtype): torch.ones(3).to(dtype) for dtype in image.DTYPES}, {})
def test_an_image_is_read_as_it_was_written(found, document):
    """By the format's own library and by ours; data begins on a page and each tensor on a multiple
    of its elements' size.
    """
    layout, body = image.layout(found, document), bytes(written(found, document))
    assert len(layout.head) % safetensors_header.PAGE == 0
    assert all(offset % tensor.element_size() == 0 for offset, tensor in layout.places)
    ends = [len(layout.head), *(offset + tensor.nbytes for offset, tensor in layout.places)]
    assert [*(offset for offset, _ in layout.places), layout.size_bytes] == ends
    once = {id(each): each.nbytes for each in found.values()}
    assert layout.size_bytes == len(layout.head) + sum(once.values())
    assert all(bits(each) == bits(found[name]) for name, each in safetensors.torch.load(body).items())
    dense = {name: torch.empty_like(each).stride() for name, each in found.items() if each.numel()}
    read, there = image.read(bytearray(body))
    assert json.dumps(there) == json.dumps(document)
    assert [bits(read[name]) for name in found] == list(map(bits, found.values()))
    assert {name: read[name].stride() for name in dense} == dense


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fn, "sparse"])
def test_a_tensor_unknown_to_the_format_is_refused_by_name(dtype):
    """Before a byte is written."""
    tensor = torch.eye(2).to_sparse() if dtype == "sparse" else torch.zeros(2, dtype=dtype)
    with pytest.raises(StateNotSavable, match=r"state entry net\.odd"):
        image.layout({"net.odd": tensor}, None)


# What is no image, or not whole.

IMAGE = bytes(
    written({"net.half": torch.ones(2).bfloat16(), "net.w": torch.arange(6.0).view(2, 3).T}, {"state": {}})
)
HEADER_BYTES = len(IMAGE) - 28
METADATA = {image.DOCUMENT: '{"state": {}}', image.TIES: "{}", image.STRIDES: "{}"}
GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]}


def with_header(entry, data=bytes(64), **more):
    text = json.dumps({"__metadata__": METADATA | more, "x": entry}).encode()
    return bytearray(safetensors_header.LENGTH.pack(len(text)) + text + data)


def is_damage_or_harmless(data):
    """No tensor holds more than the image gave."""
    with suppress(CheckpointDamaged):
        found, _ = image.read(data)
        assert sum(each.untyped_storage().nbytes() for each in found.values()) <= len(data)


@given(st.integers(0, len(IMAGE) - 1))
def test_every_truncation_is_damage(cut):
    """A write that was torn after any byte."""
    with pytest.raises(CheckpointDamaged):
        image.read(bytearray(IMAGE[:cut]))


@settings(max_examples=300)
@given(st.integers(0, len(IMAGE[:HEADER_BYTES].rstrip())), st.integers(1, 255))
def test_a_flipped_byte_in_the_header_is_damage_or_harmless(place, flip):
    """The length word included, which may then announce exabytes."""
    data = bytearray(IMAGE)
    data[place] ^= flip
    is_damage_or_harmless(data)


WILD = JSON | st.integers(-2, 9) | st.lists(st.integers(-2, 9) | st.integers() | st.floats(), max_size=3)


@settings(max_examples=300)
@given(st.sampled_from(["dtype", "shape", "data_offsets", "strides"]), WILD)
def test_an_entry_of_any_values_is_damage_or_harmless(field, value):
    """Well-formed JSON with numbers far too large, negative, not whole, or no numbers at all.
    Strides with gaps or overlaps would take memory that the entry does not have, or read beside it.
    """
    entry = GOOD if field == "strides" else GOOD | {field: value}
    strides = {image.STRIDES: json.dumps({"x": value})} if field == "strides" else {}
    is_damage_or_harmless(with_header(entry, **strides))


@pytest.mark.parametrize(
    ("change", "ties"),
    [
        *(({"shape": shape}, {}) for shape in ([2, 2], [-2, -3], [2.0, 3], 6)),
        *(({"data_offsets": offsets}, {}) for offsets in ([48, 72], [-24, 0], [8])),
        ({"shape": [2**64, 0], "data_offsets": [8, 8]}, {}),
        ({"shape": [0], "data_offsets": [72, 72]}, {}),
        ({"dtype": "F5"}, {}),
        *(({}, ties) for ties in ({"y": "z"}, {"x": "x"}, {"y": "y"}, {"y": ["x"]}, ["x"], 3)),
    ],
)
def test_an_entry_that_its_bytes_do_not_bear_out_is_damage(change, ties):
    """64 bytes of data: each change announces bytes that are not there, or too many or too few.

    Python counts negative offsets from the end, and cuts a slice at the end: both would be read.
    Ties lead to a name that is not stored, from a name that is, to itself, or are none at all.
    """
    assert safetensors_header.parse(with_header(GOOD)).entries["x"].shape == (2, 3)
    with pytest.raises(CheckpointDamaged):
        safetensors_header.parse(with_header(GOOD | change, **{image.TIES: json.dumps(ties)}))


@pytest.mark.parametrize(
    ("places", "document", "says"),
    [
        *(([0, 8], other, "lacks a state") for other in ({"step": 3}, {"state": [1]}, [1])),
        *((places, {"state": {}}, "is no tensor's") for places in ([0, 8], [8, 16], [4, 12])),
    ],
)
def test_an_image_of_less_or_more_than_a_state_has_no_digest(places, document, says):
    """Another program's safetensors file must not get one; bytes that belong to no tensor could be
    changed without a change of any part.
    """
    entry = {"dtype": "F64", "shape": [1], "data_offsets": places}
    body = with_header(entry, bytes(16), **{image.DOCUMENT: json.dumps(document)})
    with pytest.raises(CheckpointDamaged, match=says):
        hashes_by(in_memory(body), len(body))


# Its hashes.


def digest_of(found, document):
    """The twin: from tensors, one after the other."""
    entries = {}
    for name, tensor in found.items():
        digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(bytes(image.tensor_bytes(tensor).numpy()))
        entries[name] = digest.hexdigest()
    for name, value in document.items():
        entries[f"{name} (values)"] = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    return hashlib.sha256(json.dumps(sorted(entries.items())).encode()).hexdigest()


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


def cut_at(body, cuts):
    """The source of these bytes, in pieces that end where it is cut, some of them empty."""

    def pieces(start, end):
        inside = sorted(min(max(cut, start), end) for cut in cuts)
        for first, last in itertools.pairwise([start, *inside, end]):
            yield body[first:last]

    return pieces


def hashes_by(source, size_bytes, threads=1):
    found = ImageHash(source, size_bytes)
    run_all(found.tasks(), threads)
    return found.digest(), found.parts_sha256()


CUTS = st.lists(st.integers(0, 9000), max_size=6)


@given(tensors(), STATES, CUTS, st.integers(1, 4), st.integers(1, 200))
def test_both_hashes_are_the_same_in_pieces_and_on_threads(found, state, cuts, threads, task_bytes):
    """Cut inside the length word, the header, a tensor, or between two; and shared by up to four
    threads, tensor by tensor or in groups.
    """
    body = bytes(written(found, {"state": state, "step": 3}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_hash, "TASK_BYTES", task_bytes)
        hashes = hashes_by(cut_at(body, cuts), len(body), threads)
    assert hashes == (digest_of(found, state), parts_sha256_of(body))
    assert hashes_by(in_memory(body), len(body)) == hashes


@given(tensors(), st.data())
def test_the_hashes_see_every_bit_of_the_image(found, data):
    """The header too, of which the digest does not see all."""
    body = written(found, {"state": {}, "chain": "ab" * 32})
    digest, whole = hashes_by(in_memory(body), len(body))
    head = len(image.layout(found, {"state": {}, "chain": "ab" * 32}).head)
    place = data.draw(st.integers(0, head - 1) | st.integers(min(head, len(body) - 1), len(body) - 1))
    body[place] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(CheckpointDamaged):
        now = hashes_by(in_memory(body), len(body))
        assert now[1] != whole and (place < head or now[0] != digest)


# Its checksum.


@given(st.integers(1, 20_000), st.integers(0, 9), st.data())
def test_one_flipped_bit_shows_and_the_address_does_not(size, shift, data):
    """Words that do not lie on their boundaries are summed as if they did."""
    whole = np.arange(size).astype(np.uint8)
    elsewhere = np.concatenate([np.zeros(shift, dtype=np.uint8), whole])[shift:]
    before = checksum.of_image(whole.data)
    assert checksum.of_image(elsewhere.data) == before
    elsewhere[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum.of_image(elsewhere.data) != before


@pytest.mark.parametrize("largest", [2 * SMALL_BYTES, checksum.LARGEST_BLOCK_BYTES])
def test_a_torn_copy_and_parts_that_changed_places_show(monkeypatch, largest):
    """A plain sum would not see it: every byte is there, elsewhere. The first part of one state
    before the last part of another; one byte at the very end is lost.
    """
    monkeypatch.setattr(checksum, "LARGEST_BLOCK_BYTES", largest)
    size = 2 * SMALL_BYTES * (STRETCHES + 1)
    old, new = (np.random.default_rng(seed).bytes(size) for seed in (1, 2))
    half = size // 2
    torn = [new[:cut] + old[cut:] for cut in (400, SMALL_BYTES, 100_000, size - 400)]
    swapped = old[2 * SMALL_BYTES : 4 * SMALL_BYTES] + old[: 2 * SMALL_BYTES] + old[4 * SMALL_BYTES :]
    found = [old, new, *torn, swapped, old[half:] + old[:half], old[:-1]]
    assert len({checksum.of_image(memoryview(each)) for each in found}) == len(found)
