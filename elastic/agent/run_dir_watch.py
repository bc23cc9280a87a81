"""A run directory that is moved, replaced or full while a run trains is said, once.

Nothing stops: what is saved after a move goes into a new folder of the old name, and a full disk
costs the saves alone. A quota that the file system does not show is said only by what fails.
"""

import shutil
from collections.abc import Callable
from math import inf

from elastic.config.run_dir import RunDir
from elastic.system.clock import Clock

LOOK_S = 1.0
# No checkpoint fits in less. A full disk has a page to spare now and then.
ROOM_BYTES = 2**20


class RunDirWatch:
    def __init__(self, run: RunDir, report: Callable[[str], None], clock: Clock) -> None:
        self._run = run
        self._report = report
        self._clock = clock
        self._looked_s = clock.monotonic()
        self._said = set[str]()
        self._first = self._found()

    def poll(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s, found = now_s, self._found()
        if self._first is None:
            self._first = found  # with no folder in it, the run directory is made by the first write
        elif found != self._first:
            self._say(
                f"{self._run.local} was moved, replaced or removed while this run trains. Training goes on, and what is saved from now on"
                " goes into a new folder of that name; what was saved before is where it was moved to. To have one run again, end this"
                " one (Ctrl-C), move the new checkpoints into the old folder, and give it its name back"
            )
        if self._free_bytes() < ROOM_BYTES:
            self._say(
                f"no room in {self._run.local}: until there is, nothing is saved, and metrics and events wait in memory, to be lost with"
                " their process; training goes on. Free space there"
            )

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._report(sentence)

    def _free_bytes(self) -> float:
        try:
            return shutil.disk_usage(self._run.local).free
        except OSError:
            return inf  # it is not there, which is said above

    def _found(self) -> tuple[int, int] | None:
        try:
            about = self._run.local.stat()
        except OSError:
            return None
        return about.st_dev, about.st_ino
