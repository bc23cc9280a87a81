"""The checkpoints of a run: how many, and how old the newest one was at each moment.

That age is what the death of all nodes would have cost. It does not promise precision across nodes:
each commit carries the clock of the node that saved.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from elastic import events as kinds
from elastic.observe.logged_event import Events, of_kind
from elastic.observe.newest_checkpoint import newest_checkpoint
from elastic.report.picture import series
from elastic.report.picture.generations import since
from elastic.report.picture.series import Series
from elastic.report.picture.thinned import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """age: seconds, over seconds since the run began; it grows from the start and from each commit.

    newest_step, size_bytes: of the newest one. seconds: median of what one took. longest_age: of
    the newest one, while nodes trained or came together; a planned stop does not count, nor does a
    time without a node. commits: when they were committed, seconds since the run began, ascending;
    commits_left_out: how many have no room there.
    """

    committed: int
    failed: int
    newest_step: int | None
    size_bytes: int | None
    seconds: float | None
    longest_age: float
    age: Series
    commits: list[float]
    commits_left_out: int


def checkpoints(events: Events, pieces: Sequence[tuple[float, float]], began: float) -> Checkpoints:
    """All commits. pieces: (begin, end) of every generation, in order, seconds since `began`."""
    commits = of_kind(events, kinds.CheckpointCommitted)
    newest = newest_checkpoint(events)
    times = sorted(since(began, each.time) for each in commits)
    ages = _ages(times, pieces)
    return Checkpoints(
        committed=len(commits),
        failed=len(of_kind(events, kinds.CheckpointFailed)),
        newest_step=newest.event.step if newest else None,
        size_bytes=newest.event.size_bytes if newest else None,
        seconds=median(each.event.seconds for each in commits) if commits else None,
        longest_age=max((age for _, age in ages if age is not None), default=0.0),
        age=series.of_points("age", ages, unit="s", most=600),
        commits=times,
        commits_left_out=0,
    )


def within(whole: Checkpoints, most: int) -> Checkpoints:
    """With `most` of the commits, which lie evenly among all; at least 2."""
    times = whole.commits
    if len(times) <= most:
        return whole
    shown = [times[at * (len(times) - 1) // (most - 1)] for at in range(most)]
    return replace(whole, commits=shown, commits_left_out=len(times) - most)


def _ages(commits: Sequence[float], pieces: Sequence[tuple[float, float]]) -> list[Point]:
    """The corners of a saw: up to the age before a commit, down to 0 at it; a gap at a stop."""
    points: list[Point] = []
    left = deque(commits)
    age = 0.0
    for begin, end in pieces:
        is_gap = not points or begin > points[-1][0]
        if points and is_gap:
            points.append((begin, None))
        while left and left[0] < begin:  # what was saved while nodes were away, at a planned stop
            left.popleft()
            age = 0.0
        if is_gap:
            points.append((begin, age))
        at = begin
        while left and left[0] <= end:
            commit = left.popleft()
            points += [(commit, age + commit - at), (commit, 0.0)]
            at, age = commit, 0.0
        age += end - at
        points.append((end, age))
    return _corners(points)


def _corners(points: Sequence[Point]) -> list[Point]:
    """Without those in the middle of an edge: where a generation follows the one before at once."""
    return [
        point
        for before, point, after in zip([None, *points], points, [*points[1:], None], strict=False)
        if before is None or after is None or not _is_within(before, point, after)
    ]


def _is_within(before: Point, point: Point, after: Point) -> bool:
    values = before[1], point[1], after[1]
    return None not in values and values[0] < values[1] < values[2]  # type: ignore[operator]
