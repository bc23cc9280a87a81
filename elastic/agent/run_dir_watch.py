"""A run directory that is moved or replaced while a run trains is said, once.

Nothing stops: what is saved from then on goes into a new folder of the old name.
"""

from collections.abc import Callable

from elastic.config.run_dir import RunDir
from elastic.system.clock import Clock

LOOK_S = 1.0


class RunDirWatch:
    def __init__(self, run: RunDir, report: Callable[[str], None], clock: Clock) -> None:
        self._run = run
        self._report = report
        self._clock = clock
        self._looked_s = clock.monotonic()
        self._is_said = False
        self._first = self._found()

    def poll(self) -> None:
        now_s = self._clock.monotonic()
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

    def _found(self) -> tuple[int, int] | None:
        try:
            about = self._run.local.stat()
        except OSError:
            return None
        return about.st_dev, about.st_ino
