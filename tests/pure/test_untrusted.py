"""Foreign JSON becomes the value that its dataclass describes, or an error that says where."""

import json
import re
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
    ("change", "says"),
    [
        ({"length": True}, "trip.length"),
        ({"length": 10**100}, "trip"),
        ({"length": float("nan")}, "trip"),
        ({"length": "x"}, "trip.length to be valid, found: Expected `float`, got `str`"),
        ({"length": 1e200}, "trip.length to be a number, found 1e+200"),
        ({"label": False}, "trip.label"),
        ({"stops": {}}, "trip.stops"),
        ({"stops": [{"host": "b", "port": 65536}]}, "trip.stops[0].port to be valid, found: Expected `int`"),
        ({"words": {"x": 1}}, "trip.words"),
        ({"start": {"port": 1}}, "trip.start"),
        ({"start": {"host": "a", "port": True}}, "trip.start.port"),
        ({"start": {"host": "a", "port": -1}}, "trip.start.port"),
        ({"start": {"host": "a\n", "port": 1}}, "trip.start.host"),
    ],
    ids=str,
)
def test_a_refusal_names_place_expectation_and_finding(change, says):
    for exact in (True, False):
        with pytest.raises(ValueError, match=rf"^expected {re.escape(says)}"):
            decode(Trip, TRIP | change, what="trip", exact=exact)


def test_only_an_exact_reading_asks_for_all_keys_and_no_others():
    """A key that is missing takes its default, if it has one."""
    for change, says in (
        ({"more": 1}, "trip"),
        ({"start": {"host": "a"}}, "trip.start"),
        ({"start": {"host": "a", "port": 1, "more": 1}}, "trip.start to have host, port, found"),
    ):
        with pytest.raises(ValueError, match=f"^expected {says}"):
            decode(Trip, TRIP | change, what="trip")
        decode(Trip, TRIP | change, what="trip", exact=False)
    short = {name: value for name, value in TRIP.items() if name != "sender"}
    assert decode(Trip, short, what="trip", exact=False).sender == "me"
    with pytest.raises(ValueError, match="missing required field"):
        decode(Trip, {"start": TRIP["start"]}, what="trip", exact=False)


def test_of_a_union_the_one_with_these_keys_is_decoded():
    assert decode(Trip | Place, {"host": "a", "port": 1}, what="it") == Place(host="a", port=1)
