"""Foreign JSON becomes the value that its dataclass describes, or an error that says where."""

import json
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hostile import HOSTILE, json_values, spoiled, texts
from hypothesis import given
from hypothesis import strategies as st

from elastic.system.untrusted import bounds, decode, encode, fits, pattern

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


def is_number(value: Any, *kinds: type) -> bool:
    return type(value) in kinds and -(10**100) < value < 10**100


def place(value: Any, exact: bool) -> Place | None:
    """The twin's reading of a Place."""
    if type(value) is not dict or (exact and set(value) != {"host", "port"}):
        return None
    host, port = value.get("host"), value.get("port", 0)
    if type(host) is not str or not host or not all("a" <= each <= "z" for each in host):
        return None
    return Place(host=host, port=port) if type(port) is int and port in range(65536) else None


def trip(value: Any, exact: bool) -> Trip | None:
    """What `decode` must give, written out by hand; None where it must refuse."""
    if (
        type(value) is not dict
        or (exact and set(value) != set(TRIP))
        or not set(TRIP) - {"sender"} <= set(value)
    ):
        return None
    start, end = place(value["start"], exact), value["end"]
    end_place = None if end is None else place(end, exact)
    stops = [place(each, exact) for each in value["stops"]] if type(value["stops"]) is list else [None]
    words, label = value["words"], value["label"]
    good = [
        start is not None,
        None not in stops,
        (end is None) == (end_place is None),
        type(words) is dict and all(type(each) is str for each in words.values()),
        is_number(value["length"], int, float),
        label is None or type(label) is str or is_number(label, int),
        type(value.get("sender", "me")) is str,
    ]
    if not all(good):
        return None
    return Trip(
        **{name: value[name] for name in TRIP if name not in ("start", "stops", "end", "sender")},
        start=start,
        stops=tuple(stops),
        end=end_place,
        sender=value.get("sender", "me"),
    )


trips = st.fixed_dictionaries(
    {
        "start": st.just({"host": "a", "port": 1}) | st.just({"host": "a"}) | json_values,
        "stops": st.lists(st.just({"host": "b", "port": 2}) | json_values, max_size=2),
        "end": st.none() | st.just({"host": "b", "port": 2, "more": 1}) | json_values,
        "words": st.dictionaries(texts, texts, max_size=2) | json_values,
        "length": st.floats() | st.integers(),
        "label": json_values,
    },
    optional={"sender": texts, "more": json_values},
)


@given(spoiled(TRIP) | trips, st.booleans(), st.booleans())
def test_decode_agrees_with_a_reading_written_out_by_hand(record, exact, as_text):
    """Records with fields replaced, dropped or added at any depth, as text and as parsed values."""
    expected = trip(record, exact)
    data = json.dumps(record) if as_text else record
    if expected is None:
        with pytest.raises(ValueError, match=r"^expected the trip"):
            decode(Trip, data, what="the trip", exact=exact)
    else:
        assert decode(Trip, data, what="the trip", exact=exact) == expected


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[:12]))
@pytest.mark.parametrize("exact", [True, False])
def test_hostile_bytes_are_a_value_error_in_a_short_message(data, exact):
    """Deep nesting, endless numbers, no text at all, a pickle."""
    with pytest.raises(ValueError, match=r"^expected the trip") as caught:
        decode(Trip, data, what="the trip", exact=exact)
    assert len(str(caught.value)) < 400


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


def test_encode_gives_back_what_decode_read():
    """Nested records."""
    assert json.loads(json.dumps(encode(decode(Trip, TRIP, what="trip")))) == TRIP


@given(json_values)
def test_fits_tells_what_decode_would_accept(value):
    """A value of any shape in a field of each type."""
    for kind, expected in (
        (bool, type(value) is bool),
        (str, type(value) is str),
        (list[str], type(value) is list and all(type(each) is str for each in value)),
        (float | None, value is None or is_number(value, int, float)),
    ):
        assert fits(value, kind) == expected
