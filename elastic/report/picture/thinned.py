"""A series of any length becomes a few points, in which each spike and each gap is still there.

Neighbouring points form a bucket; of each bucket stay the lowest, the highest, and the first
without a value, which a chart shows as a gap. A bucket's size is a power of two, and two neighbours
of one size make one of twice that size. So points may come in parts of any size, and no more than
those that stay are kept of a million. It does not promise the points in between.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice

import numpy as np

from elastic.observe.step_batch import Floats, Ints, number

Point = tuple[float, float | None]


class Thinned:
    """bucket: of how many points each one that stays is the lowest or the highest; 1 where all
    stay. gaps: how many have no value; first_gap: where the first of these is.
    """

    def __init__(self, most: int) -> None:
        """most: how many points stay, beside the newest; at least 3."""
        self.bucket = 1
        self.gaps = 0
        self.first_gap: float | None = None
        self._most = most
        self._num_points = 0
        self._whole: list[list[Point]] = []  # what stays of each bucket but the last
        self._last: list[Point] = []  # and of the last one, which has room
        self._num_last = 0
        self._newest: Point | None = None

    def extend(self, at: Floats | Ints, values: Floats) -> None:
        """The next points, in their order: where each is, and its value or NaN; of shape (points,).

        No value is infinite.
        """
        if not len(at):
            return
        self._num_points += len(at)
        self._coarsen()
        is_gap = np.isnan(values)
        if is_gap.any():
            self.first_gap = at[is_gap][0].item() if self.first_gap is None else self.first_gap
            self.gaps += int(np.count_nonzero(is_gap))
        # The rest of a bucket that was begun, whole ones, and what begins the next.
        first = min(len(at), self.bucket - self._num_last) if self._num_last else 0
        rest = first + (len(at) - first) // self.bucket * self.bucket
        for begin, end, size in (
            (0, first, first),
            (first, rest, self.bucket),
            (rest, len(at), len(at) - rest),
        ):
            if begin < end:
                for ends in _ends(at[begin:end], values[begin:end], size):
                    self._add(ends, size)
        self._newest = at[-1].item(), number(values[-1])

    def _add(self, ends: list[Point], num_points: int) -> None:
        """ends: what stays of the next points, which do not exceed the room of the last bucket."""
        self._last = _kept([*self._last, *ends]) if self._last else ends
        self._num_last += num_points
        if self._num_last == self.bucket:
            self._whole.append(self._last)
            self._last, self._num_last = [], 0

    def points(self, *, whole_gaps: bool = False) -> list[Point]:
        """Those that stay, ascending. The newest, for which a reader asks first, is one of them.

        whole_gaps: there is a gap only where no point of a bucket has a value.
        """
        buckets = [*self._whole, self._last]
        if whole_gaps:
            buckets = [[point for point in own if point[1] is not None] or own for own in buckets]
        shown = [point for bucket in buckets for point in bucket]
        return shown if self._newest in shown[-1:] or self._newest is None else [*shown, self._newest]

    def within(self, most: int) -> "Thinned":
        """As it were with that `most`, if that is less; this one stays as it is."""
        found = copy(self)
        found.shrink(most)
        return found

    def shrink(self, most: int) -> None:
        """From now on, no more than `most` points stay, beside the newest."""
        self._most = min(most, self._most)
        self._coarsen()

    def _coarsen(self) -> None:
        while self._num_points > self._most and -(-self._num_points // self.bucket) > self._most // 3:
            self._double()

    def _double(self) -> None:
        """Make one bucket of two."""
        whole = self._whole
        if len(whole) % 2:
            *whole, odd = whole
            self._last = _kept([*odd, *self._last])
            self._num_last += self.bucket
        pairs = zip(whole[::2], whole[1::2], strict=True)
        self._whole = [_kept([*first, *second]) for first, second in pairs]
        self.bucket *= 2


def _kept(points: Sequence[Point]) -> list[Point]:
    """The lowest, the highest, and the first gap, in their order; of equal values the first."""
    values = [value for _, value in points]
    places = {values.index(None)} if None in values else set()
    if finite := [value for value in values if value is not None]:
        places |= {values.index(min(finite)), values.index(max(finite))}
    return [points[place] for place in sorted(places)]


def _ends(at: Floats | Ints, values: Floats, size: int) -> Iterator[list[Point]]:
    """The same of each `size` neighbours, for all of them at once."""
    rows = values.reshape(-1, size)
    lowest, highest, is_gap = rows.argmin(axis=1), rows.argmax(axis=1), np.isnan(rows)
    ends = [lowest, highest]
    if is_gap.any():  # to NumPy, NaN is the lowest and the highest
        ends = [
            lowest,
            np.where(is_gap, np.inf, rows).argmin(axis=1),
            np.where(is_gap, -np.inf, rows).argmax(axis=1),
        ]
    places = np.sort(np.stack(ends, axis=1), axis=1)
    is_new = np.ones(places.shape, np.bool_)
    is_new[:, 1:] = places[:, 1:] != places[:, :-1]
    kept = (places + np.arange(0, len(values), size)[:, np.newaxis])[is_new]
    points = zip(at[kept].tolist(), map(number, values[kept].tolist()), strict=True)
    for num_kept in np.count_nonzero(is_new, axis=1).tolist():
        yield [*islice(points, num_kept)]
