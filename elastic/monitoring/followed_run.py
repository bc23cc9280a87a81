"""The numbers of a run, from its files alone, in reads that are bounded.

Events are read before metrics: an event of a step is written after the step's line, so that the
line is known where the event is. With a run directory at a URL, the files are those of this node,
and the numbers are what this node saw.
"""

from collections.abc import Iterator

from elastic.config.run_dir import RunDir
from elastic.monitoring.followed_events import FollowedEvents
from elastic.monitoring.followed_metrics import FollowedMetrics, WentBack
from elastic.monitoring.run_totals import RunTotals
from elastic.observe.step_line import StepLine


class FollowedRun:
    def __init__(self, run: RunDir, node: str) -> None:
        self.node, self.totals = node, RunTotals()
        self.metrics = FollowedMetrics(run.metrics_of(node))
        self._events = FollowedEvents(run.events)

    @property
    def is_caught_up(self) -> bool:
        """Whether the last poll saw the end of all files."""
        return self._events.is_at_end and self.metrics.is_at_end

    def poll(self) -> Iterator[StepLine | WentBack]:
        """What became of the steps since the last poll. Raises OSError for what cannot be read."""
        for logged in self._events.poll():
            self.totals.add_event(logged)
        if not self._events.is_at_end:
            return
        for item in self.metrics.poll():
            if isinstance(item, StepLine):
                self.totals.add_line(item)
            yield item
        if self.is_caught_up:
            self.totals.count_recoveries(self.metrics.recent_lines)
            self.metrics.forget_older_than(self.totals.oldest_kept)

    def close(self) -> None:
        self.metrics.close()
