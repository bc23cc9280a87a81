"""A sharded state is cut into one part for each rank, and each part is an image of its own.

A part has its rank's rows of sharded tensors, as torch.chunk cuts them, and of the other tensors
every `of`-th, so that each is in one part. Its document is that of the whole state, and says
beside it (`CUT`) what the whole is made of: any part tells where all bytes of all parts belong.
`joined` makes an image of the whole of them. It needs no torch.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.errors import CheckpointDamaged
from elastic.snapshot import safetensors_header
from elastic.snapshot.image_hash import Pieces, Source
from elastic.snapshot.safetensors_header import DOCUMENT, DTYPES, STRIDES, TIES, Header
from elastic.system.untrusted import decode

CUT = "cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """of: parts. number: of the part that says so. dtypes, shapes: of all whole tensors, by name.
    owners: the parts of those that are not cut by rows. ties: as of a Header.
    """

    of: int
    number: int
    dtypes: dict[str, str]
    shapes: dict[str, list[int]]
    owners: dict[str, int]
    ties: dict[str, str]

    def __post_init__(self) -> None:
        is_known = all(each in DTYPES for each in self.dtypes.values())
        if not is_known or self.dtypes.keys() != self.shapes.keys() or not 0 <= self.number < self.of:
            raise ValueError("the division of a state makes no sense")

    @staticmethod
    def of_header(header: Header) -> "Division":
        """Of an image that is no part: one of one. Raises CheckpointDamaged."""
        try:
            found = header.document["about"].get(CUT)
            if found is not None:
                return decode(Division, found, what="the division of a state")
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointDamaged(f"the payload is not a training state: {error}") from error
        return Division(
            of=1,
            number=0,
            dtypes={name: each.dtype for name, each in header.entries.items()},
            shapes={name: list(each.shape) for name, each in header.entries.items()},
            owners=dict.fromkeys(header.entries, 0),
            ties=header.ties,
        )

    def check(self, parts: Mapping[int, Header], document: Any) -> None:
        """document: of one part. Raises CheckpointDamaged for a part that is of another state, or
        lacks some of its rows.
        """
        for number, part in parts.items():
            sizes = {name: each.end - each.start for name, each in part.entries.items()}
            expected = {name: len(self.rows_of(name, number)) * self.row_bytes(name) for name in self.shapes}
            is_cut_so = Division.of_header(part) == replace(self, number=number)
            # What stands beside a state is no part of it, and ranks may differ there.
            is_of_it = is_cut_so and part.document | {"about": 0} == document | {"about": 0}
            if not is_of_it or any(sizes.get(name, 0) != size for name, size in expected.items()):
                raise CheckpointDamaged(f"part {number} is that of another state than the first part")

    def rows_of(self, name: str, number: int) -> range:
        """The rows of a tensor that a part has. One without dimensions counts as a row."""
        shape = self.shapes[name]
        rows = shape[0] if shape else 1
        if (owner := self.owners.get(name)) is None:
            return chunk(rows, number, self.of)
        return range(rows if owner == number else 0)

    def row_bytes(self, name: str) -> int:
        return math.prod(self.shapes[name][1:]) * DTYPES[self.dtypes[name]][1]


def uncut(document: Any) -> Any:
    """The document of the whole state."""
    about = {key: value for key, value in document["about"].items() if key != CUT}
    return document | {"about": about}


def chunk(rows: int, number: int, of: int) -> range:
    """Those that torch.chunk gives to one of so many."""
    most = -(-rows // of)
    return range(min(number * most, rows), min((number + 1) * most, rows))


@dataclass(frozen=True, slots=True)
class Joined:
    """The image of a whole state, whose head is made of those of its parts.

    segments: (where it begins, where it begins in its part, number of the part) of pieces of
    tensors, in the order of their places, without gaps after the head.
    """

    head: bytes
    segments: list[tuple[int, int, int]]
    size_bytes: int

    def source(self, parts: Sequence[Source]) -> Source:
        """Of its bytes, from those of the parts."""

        def pieces(start: int, end: int) -> Pieces:
            if start < len(self.head):
                yield self.head[start:end]
            start = max(start, len(self.head))
            number = bisect_right(self.segments, start, key=lambda segment: segment[0]) - 1
            while start < end:
                begin, there, part = self.segments[number]
                until = min(end, self._end(number))
                yield from parts[part](there + start - begin, there + until - begin)
                start, number = until, number + 1

        return pieces

    def places(self, part: int) -> list[tuple[int, int, int]]:
        """(where it begins in the part, its size in bytes, where it begins here), in order."""
        found = [
            (there, self._end(number) - begin, begin)
            for number, (begin, there, of) in enumerate(self.segments)
            if of == part
        ]
        return sorted(found)

    def _end(self, number: int) -> int:
        return self.segments[number + 1][0] if number + 1 < len(self.segments) else self.size_bytes


def joined(parts: Sequence[Header]) -> Joined:
    """parts: the headers of all parts of a state, in order.

    Raises CheckpointDamaged for those that do not belong together.
    """
    division = Division.of_header(parts[0])
    plan = safetensors_header.plan(
        {name: (dtype, division.shapes[name]) for name, dtype in division.dtypes.items()}
    )
    if division.of != len(parts):
        raise CheckpointDamaged(f"expected {division.of} parts of a state, found {len(parts)}")
    division.check(dict(enumerate(parts)), parts[0].document)
    strides = {name: each for part in parts for name, each in part.strides.items() if name in division.owners}
    metadata = {
        DOCUMENT: json.dumps(uncut(parts[0].document)),
        TIES: json.dumps(division.ties),
        STRIDES: json.dumps(strides),
    }
    head = safetensors_header.head(plan.entries, metadata)
    segments = []
    for name, start in plan.starts:
        row_bytes = division.row_bytes(name)
        for number, part in enumerate(parts):
            if rows := division.rows_of(name, number):
                segments.append(
                    (len(head) + start + rows.start * row_bytes, part.entries[name].start, number)
                )
    return Joined(head, segments, len(head) + plan.size_bytes)
