"""A run directory that is moved, replaced or full while a run trains is said, once.

Nothing stops: what is saved after a move goes into a new folder of the old name, which is made the
run's again, and a full disk costs the saves alone. A node that finds another run in the old name
leaves. A quota that the file system does not show is said only by what fails.
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from math import inf

from elastic.config.run_dir import RunDir
from elastic.errors import ElasticError
from elastic.system.clock import Clock

LOOK_S = 1.0
# No checkpoint fits in less. A full disk has a page to spare now and then.
ROOM_BYTES = 2**20


class RunDirWatch:
    def __init__(
        self,
        run: RunDir,
        report: Callable[[str], None],
        clock: Clock,
        *,
        reclaim: Callable[[], bool] = lambda: True,
        ban: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """reclaim: makes the old name the run's again; False where it is another run's. ban: ends
        this node's part.
        """
        self._reclaim, self._ban = reclaim, ban
        self._run = run
        self._report = report
        self._clock = clock
        self._looked_s = clock.monotonic()
        self._said = set[str]()
        self._first = self._last = self._found()
        self._is_reclaimed = False

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
            # At the second look: a command with --fresh renames, and then claims the name.
            if not self._is_reclaimed and self._last != self._first:
                self._claim_name()
        self._last = found
        if self._free_bytes() < ROOM_BYTES:
            self._say(
                f"no room in {self._run.local}: until there is, nothing is saved, and metrics and events wait in memory, to be lost with"
                " their process; training goes on. Free space there"
            )

    def _claim_name(self) -> None:
        with suppress(ElasticError, OSError):  # tried again at the next look
            is_ours = self._run.is_remote or self._reclaim()
            self._is_reclaimed = True
            if not is_ours:
                self._ban(
                    "another command took over the run directory while this one stood still, or after it was moved"
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
