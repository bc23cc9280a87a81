"""Hostile input for readers: malformed bytes and records, and a pickle that shows when it is
executed.
"""

import json
import pickle
from pathlib import Path
from typing import Any

from hypothesis import strategies as st


class Bomb:
    """Unpickling it makes the folder `flag`."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.flag,)


def bomb(flag: Path) -> bytes:
    return pickle.dumps(Bomb(flag), protocol=0)


HOSTILE = [
    b"\xff\xfe\xff",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 1_000_000,
    b"1" * 5_000,
    "²".encode(),
    "٣".encode(),
    b"NaN",
    b"Infinity",
    b"1e999",
    b'"\\ud800"',
    b'{"step": 1e999}',
    bomb(Path("/nowhere/went-off")),
]

numbers = (
    st.integers()
    | st.integers(-2, 9)
    | st.sampled_from([10**12, 2**63, 10**400, -(10**400)])
    | st.floats()
    | st.booleans()
)
texts = st.text(max_size=6) | st.sampled_from(
    [
        "../../x",
        "/etc/passwd",
        "a\0b",
        "\x1b]0;x\x07",
        "[/red]",
        "\ud800",
        "\u202e",
        "x:99999",
    ]
)
json_values = st.recursive(
    st.none() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
junk = st.binary(max_size=200) | st.sampled_from(HOSTILE) | json_values.map(lambda v: json.dumps(v).encode())


@st.composite
def spoiled(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """A record with some fields replaced by arbitrary values, removed or added, at any depth."""
    record: dict[str, Any] = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(0, 3))):
        place = record
        while True:
            name = draw(st.sampled_from(sorted(place))) if place else None
            inner = None if name is None else place[name]
            if isinstance(inner, list) and inner and isinstance(inner[0], dict) and draw(st.booleans()):
                place = inner[0]
            elif isinstance(inner, dict) and inner and draw(st.booleans()):
                place = inner
            else:
                break
        if name is not None and draw(st.integers(0, 5)) == 0:
            del place[name]
        else:
            place[draw(texts) if name is None else name] = draw(json_values)
    return record
