"""Foreign JSON becomes the value that its dataclass describes, or an error that says where."""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import pytest
from hostile import spoiled
from hypothesis import given

from elastic.system.untrusted import bounds, decode, encode, pattern

Port = Annotated[int, bounds(lowest=0, below=65536)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    host: Annotated[str, pattern(r"[a-z]+", "a name of small letters")]
    port: Port = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    start: Place
    stops: tuple[Place, ...]
    end: Place | None
    words: dict[str, str]
    length: float
    label: int | str | None
    sender: str = "me"


TRIP = {
    "start": {"host": "a", "port": 1},
    "stops": [{"host": "b", "port": 0}, {"host": "c", "port": 65535}],
    "end": None,
    "words": {"x": "y"},
    "length": 1,
    "label": "z",
    "sender": "you",
}


@given(spoiled(TRIP))
def test_what_is_decoded_stands_there(record):
    """Nothing is converted, left out or added, in records that are spoiled at any depth."""
    with suppress(ValueError):
        found = decode(Trip, json.dumps(record), what="the trip")
        assert json.loads(json.dumps(encode(found))) == record


@pytest.mark.parametrize(
    "change",
    [
        {"length": True},
        {"length": 10**100},
        {"length": float("nan")},
        {"label": False},
        {"stops": {}},
        {"words": {"x": 1}},
        {"start": {"port": 1}},
        {"start": {"host": "a", "port": True}},
        {"start": {"host": "a", "port": -1}},
        {"start": {"host": "a\n", "port": 1}},
    ],
    ids=str,
)
def test_a_value_of_another_type_or_beyond_its_bounds_is_refused(change):
    for exact in (True, False):
        with pytest.raises(ValueError, match=r"^expected the trip"):
            decode(Trip, TRIP | change, what="the trip", exact=exact)


def test_only_an_exact_reading_asks_for_all_keys_and_no_others():
    """A key that is missing takes its default, if it has one."""
    for record in (
        TRIP | {"more": 1},
        TRIP | {"start": {"host": "a"}},
        TRIP | {"end": {"host": "a", "x": 1}},
    ):
        with pytest.raises(ValueError, match=r"^expected the trip"):
            decode(Trip, record, what="the trip")
        decode(Trip, record, what="the trip", exact=False)
    short = {name: value for name, value in TRIP.items() if name != "sender"}
    assert decode(Trip, short, what="the trip", exact=False).sender == "me"
    with pytest.raises(ValueError, match="missing required field"):
        decode(Trip, {"start": TRIP["start"]}, what="the trip", exact=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": "x"}, "expected trip.length to be valid, found: Expected `float`, got `str`"),
        ({"stops": [{"host": "b", "port": 65536}]}, "trip.stops[0].port to be valid, found: Expected `int`"),
        ({"start": {"host": "a", "port": 1, "more": 1}}, "expected trip.start to have host, port, found"),
        ({"length": 1e200}, "expected trip.length to be a number, found 1e+200"),
    ],
)
def test_the_message_names_place_expectation_and_finding(change, message):
    with pytest.raises(ValueError, match=r"^expected") as caught:
        decode(Trip, TRIP | change, what="trip")
    assert message in str(caught.value)


def test_of_a_union_the_one_with_these_keys_is_decoded():
    assert decode(Trip | Place, {"host": "a", "port": 1}, what="it") == Place(host="a", port=1)
