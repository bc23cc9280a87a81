"""A run directory that is moved, replaced or full while a run trains is said, once.

Nothing stops: what is saved after a move goes into a new folder of the old name, and a full disk
costs the saves alone.
"""

from collections.abc import Callable

from elastic.config.run_dir import RunDir
from elastic.system.clock import Clock

LOOK_S = 1.0
# A full disk has a page to spare now and then, and workers that start say nothing of it.
ROOM_S = 60.0


class RunDirWatch:
    def __init__(self, run: RunDir, report: Callable[[str], None], clock: Clock) -> None:
        self._run = run
        self._report = report
        self._clock = clock
        self._looked_s = clock.monotonic()
        self._is_said = False
        self._first = self._found()
        self._waited_s: float | None = None  # when lines waited last; None before, or long after

    def poll(self, *, lines_wait: bool) -> None:
        """lines_wait: rank 0 of this node has lines that the disk does not take."""
        now_s = self._clock.monotonic()
        self._look_for_room(now_s, lines_wait=lines_wait)
        if self._is_said or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s, found = now_s, self._found()
        if self._first is None:
            self._first = found  # with no folder in it, the run directory is made by the first write
        elif found != self._first:
            self._is_said = True
            self._report(
                f"{self._run.local} was moved, replaced or removed while this run trains. Training goes on, and what is saved from now on"
                " goes into a new folder of that name; what was saved before is where it was moved to. To have one run again, end this"
                " one (Ctrl-C), move the new checkpoints into the old folder, and give it its name back"
            )

    def _look_for_room(self, now_s: float, *, lines_wait: bool) -> None:
        if lines_wait:
            if self._waited_s is None:
                self._report(
                    f"no room in {self._run.local}: until there is, nothing is saved, logs have holes, and metrics and events wait in"
                    " memory, to be lost with their process; training goes on. Free space there"
                )
            self._waited_s = now_s
        elif self._waited_s is not None and now_s - self._waited_s > ROOM_S:
            self._waited_s = None

    def _found(self) -> tuple[int, int] | None:
        try:
            about = self._run.local.stat()
        except OSError:
            return None
        return about.st_dev, about.st_ino
