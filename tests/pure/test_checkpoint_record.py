"""A record that parses was written whole, by this program, and names nothing outside its run."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import RECORD

from elastic.checkpoint import record as names
from elastic.checkpoint.record import parse
from elastic.errors import CheckpointDamaged

attempts = st.from_regex("a-[0-9]{6,12}-[0-9a-f]{8}", fullmatch=True)
hex_64 = st.text("0123456789abcdef", min_size=64, max_size=64)
numbers = st.integers(0, 10**12 - 1)


@st.composite
def records(draw):
    return replace(
        RECORD,
        run_id=draw(st.text(max_size=20)),
        step=draw(numbers),
        generation=draw(st.integers(0, 10**9)),
        attempt=draw(attempts),
        size_bytes=draw(numbers),
        digest=draw(hex_64),
        created=draw(st.floats(0, 1e12)),
    )


def forged(record, **changes):
    """A record whose checksum is right and whose fields are not."""
    body = json.loads(record.to_json())
    del body["self_sha256"]
    body |= changes
    return json.dumps(body | {"self_sha256": names._checksum(body)}).encode()


@given(records())
def test_a_written_record_is_read_back_unchanged(record):
    """Writes any record and parses it."""
    assert parse(record.to_json()) == record


@given(records(), st.data())
def test_any_flipped_bit_or_truncation_is_noticed(record, data):
    """Flips one bit anywhere, or cuts the record before its closing brace, as a full disk would.

    Only bits that do not change the JSON's meaning (white space) may go unnoticed.
    """
    whole = bytearray(record.to_json().rstrip())
    place = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CheckpointDamaged):
        parse(bytes(whole[:place]))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(CheckpointDamaged):
        assert parse(bytes(whole)) == record


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": "../../../etc"},
        {"attempt": "a-000001-0123456g"},
        {"attempt": "a-000001-01234567/.."},
        {"attempt": "a-000002-01234567\n"},
        {"attempt": 7},
        {"step": -1},
        {"step": True},
        {"step": 10**12},
        {"created": float("nan")},
        {"sha256": "A" * 64},
        {"checksum": "0" * 63},
        {"format": 3},
        {"surprise": 1},
    ],
)
def test_a_right_checksum_does_not_excuse_a_wrong_field(changes):
    """Forges records with a matching checksum and one field that cannot be, paths that leave the
    directory among them.
    """
    good = RECORD
    assert parse(forged(good)) == good
    with pytest.raises(CheckpointDamaged, match=next(iter(changes))):
        parse(forged(good, **changes))


@given(records())
def test_a_name_is_parsed_into_the_parts_it_was_made_of(record):
    record = replace(record, attempt=names.new_attempt(record.generation))
    for name in (record.name, record.payload):
        assert names.parse_name(name) == names.StoredName(
            step=record.step,
            folder=record.folder,
            generation=record.generation,
            is_record=name == record.name,
        )


@pytest.mark.parametrize(
    "name",
    [
        *("COMMIT.json", "12/a-000001-01234567/COMMIT.json", "000000000012/COMMIT.json"),
        *("000000000012/x/COMMIT.json", "000000000012/a-000001-01234567/x/COMMIT.json"),
    ],
)
def test_a_name_of_another_shape_is_no_commit_record(name):
    """Names that a person or another program may have left there."""
    found = names.parse_name(name)
    assert found is None or not found.is_record
