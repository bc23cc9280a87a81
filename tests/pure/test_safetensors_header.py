"""Headers are believed as far as their image's bytes go."""

import json

import pytest

from elastic.errors import CheckpointDamaged
from elastic.snapshot import image_hash, safetensors_header


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
        image_hash.digest(with_header({"__metadata__": metadata(document=document), "x": GOOD}))
