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

numbers = st.integers(0, 10**12 - 1)


RECORDS = st.builds(
    replace,
    st.just(RECORD),
    run_id=st.text(max_size=20),
    step=numbers,
    generation=st.integers(0, 10**9),
    attempt=st.from_regex("a-[0-9]{6,12}-[0-9a-f]{8}", fullmatch=True),
    size_bytes=numbers,
    digest=st.text("0123456789abcdef", min_size=64, max_size=64),
    created=st.floats(0, 1e12),
)


def forged(record, **changes):
    """A record whose checksum is right and whose fields are not."""
    body = json.loads(record.to_json())
    del body["self_sha256"]
    body |= changes
    return json.dumps(body | {"self_sha256": names._checksum(body)}).encode()


@given(RECORDS, st.data())
def test_a_record_is_read_back_and_any_change_is_noticed(record, data):
    """Any record is read back as it was written, but not with one bit flipped anywhere, or cut
    before its closing brace, as a full disk would.

    Only bits that do not change the JSON's meaning (white space) may go unnoticed.
    """
    assert parse(record.to_json()) == record
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
        *({"attempt": attempt} for attempt in ("../../../etc", "a-000001-0123456g", 7)),
        *({"attempt": attempt} for attempt in ("a-000001-01234567/..", "a-000002-01234567\n")),
        *({"step": step} for step in (-1, True, 10**12)),
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
    assert parse(forged(RECORD)) == RECORD
    with pytest.raises(CheckpointDamaged, match=next(iter(changes))):
        parse(forged(RECORD, **changes))


@given(RECORDS)
def test_a_name_is_parsed_into_the_parts_it_was_made_of(record):
    record = replace(record, attempt=names.attempt_name(record.generation, "0123abcd"))
    where = {"step": record.step, "folder": record.folder, "generation": record.generation}
    for name in (record.name, record.payload):
        assert names.parse_name(name) == names.StoredName(**where, is_record=name == record.name)


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
