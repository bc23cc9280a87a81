"""A series of any length becomes a few points, in which each spike and each gap is still there.

Neighbouring points form a bucket; of each bucket stay the lowest, the highest, and the first
without a value, which a chart shows as a gap. A bucket's size is a power of two, and two neighbours
of one size make one of twice that size. So points may come in parts of any size, and no more than
those that stay are kept of a million. It does not promise the points in between.
"""

from collections.abc import Sequence
from copy import copy
from types import NoneType

from elastic.observe.step_batch import has

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

    def extend(self, at: Sequence[float], values: Sequence[float | None]) -> None:
        """The next points, in their order: where each is, and its value."""
        if not at:
            return
        self._num_points += len(at)
        self._coarsen()
        has_gaps = has(NoneType, values)
        if has_gaps:
            self.first_gap = at[values.index(None)] if self.first_gap is None else self.first_gap
            self.gaps += values.count(None)
        begin = 0
        while begin < len(at):
            end = min(len(at), begin + self.bucket - self._num_last)
            ends = _ends(at[begin:end], values[begin:end], has_gaps=has_gaps)
            self._last = _kept([*self._last, *ends]) if self._last else ends
            self._num_last += end - begin
            if self._num_last == self.bucket:
                self._whole.append(self._last)
                self._last, self._num_last = [], 0
            begin = end
        self._newest = at[-1], values[-1]

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
    return _ends([at for at, _ in points], [value for _, value in points], has_gaps=True)


def _ends(at: Sequence[float], values: Sequence[float | None], *, has_gaps: bool) -> list[Point]:
    """The lowest, the highest, and the first gap, in their order; of equal values the first.

    has_gaps: whether there may be any.
    """
    places = set[int]()
    finite = values
    if has_gaps and None in values:
        places.add(values.index(None))
        finite = [value for value in values if value is not None]
    if finite:
        # None is not among them.
        places |= {values.index(min(finite)), values.index(max(finite))}  # type: ignore[type-var]
    return [(at[place], values[place]) for place in sorted(places)]
