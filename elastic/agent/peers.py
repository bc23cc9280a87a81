"""The other nodes as this one meets them while it trains: a backend that does not answer stops no worker, and whoever waits to join is let in when it is time.

It tells and it says what it sees; what follows is decided in decide.py. How a generation forms is the rendezvous's own business.
"""

from collections.abc import Callable
from contextlib import suppress

from elastic.agent.rejoin_backoff import RejoinBackoff
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group import Failure, Group, RunEnd
from elastic.rendezvous.rendezvous import Generation, GroupView, Rendezvous
from elastic.rendezvous.transitions import NODE_JOINED, NODE_LEFT
from elastic.system.clock import Clock


class Peers:
    """`is_first`: rank 0 ran on this node in the last generation."""

    def __init__(self, rendezvous: Rendezvous, report: Callable[[str], None], clock: Clock) -> None:
        self._rendezvous = rendezvous
        self._report = report
        self._clock = clock
        self._backoff = RejoinBackoff()
        self._is_reached, self._reached_s = True, clock.monotonic()
        self.is_first = False

    def enter(self, generation: Generation, *, step: int) -> bool:
        """A generation has formed with this node; `step` is the last that the one before it finished. Returns whether a member of that left in peace."""
        before = {node.id for node in self._backoff.members}
        self._backoff = self._backoff.entered(generation.members, step=step)
        self.is_first = generation.rank_of_node == 0
        has_left = not before <= {node.id for node in generation.members}
        return has_left and generation.cause in (NODE_LEFT, NODE_JOINED)

    def poll(self, *, step: int, is_idle: bool) -> GroupView | None:
        """None when the backend does not answer. is_idle: this node's workers have nothing left to do.

        Raises BackendFailed when an idle node has not reached it for as long as a group is waited for.
        """
        try:
            watch = self._rendezvous.watch(step=step)
        except BackendFailed as error:
            if self._is_reached:
                self._report(f"the rendezvous did not answer ({error}); training goes on")
            self._is_reached = False
            self._raise_if_idle_too_long(error, is_idle=is_idle)
            return None
        if not self._is_reached:
            self._report("the rendezvous answers again")
        self._is_reached, self._reached_s = True, self._clock.monotonic()
        return watch

    def admits(self, watch: GroupView) -> bool:
        """Whether the nodes that wait are to be let in now; the agent of rank 0 alone says so, for all."""
        now_s = self._clock.monotonic()
        self._backoff = self._backoff.observe(watch.newcomers, now_s=now_s)
        return self.is_first and self._backoff.admits(watch.newcomers, now_s=now_s)

    def report_done(self) -> bool:
        """Tell that all workers of this node succeeded; False when that was not heard. Raises BackendFailed as `look`."""
        try:
            self._rendezvous.done()
        except BackendFailed as error:
            self._raise_if_idle_too_long(error, is_idle=True)
            return False
        return True

    def close(self, cause: str, *, step: int, counts: bool, failure: Failure | None = None) -> Group | None:
        """Close the generation, unless somebody did. None when that is not heard now: it is told when all meet."""
        try:
            return self._rendezvous.close(cause, step=step, counts=counts, failure=failure)
        except BackendFailed:
            return None

    def end(self, verdict: RunEnd) -> None:
        """End the run for all."""
        with suppress(BackendFailed):  # the others will find the same
            self._rendezvous.end(verdict)

    def leave(self) -> bool:
        """Whether others go on."""
        try:
            group = self._rendezvous.leave()
        except BackendFailed:
            return False
        return bool(group.members or group.waiting)

    def _raise_if_idle_too_long(self, error: BackendFailed, *, is_idle: bool) -> None:
        if is_idle and self._clock.monotonic() - self._reached_s >= self._rendezvous.timeout_s:
            raise error
