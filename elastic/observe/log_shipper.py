"""Events, metrics and logs that a node writes are in the run's store a few seconds later.

A run directory in an object store has no files that grow, so each node writes into a local folder,
and uploads new bytes in immutable parts (`upload_parts.py`). Training never waits for it; only
the end of the agent does, for `CLOSE_WITHIN_S` at most, and no longer than its grace. A failure is
reported once, and tried again. What has not arrived then stays in the folder, and the next agent
there uploads it.

It does not promise that the newest seconds survive the machine. The lines of all steps up to a
checkpoint do: the uploader uploads them before it commits the checkpoint (`uploader/main.py`).
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path

from elastic.config.run_dir import RunDir
from elastic.observe import log, step_line, upload_parts
from elastic.storage.remote import Objects
from elastic.system.clock import SystemClock
from elastic.system.files import listing
from elastic.system.growing_file import GrowingFile, read_from

# Between two uploads: few seconds in a young run, which a user watches; a run of a week must not
# leave a million objects.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 3.0, 15.0
_PAUSE_PER_AGE = 0.005
TICK_S = 0.5
CLOSE_WITHIN_S = 15.0
PART_LIMIT_S = 10.0  # shorter than the end: a request without an answer is made again there
PART_BYTES = 1024 * 1024
_LINES_PER_PART = 1000


class MetricsShipper:
    """Uploads the metrics of one node; generation and step identify a line."""

    def __init__(self, path: Path, node: str, objects: Objects) -> None:
        self._file = GrowingFile(path)
        self._node = node
        self._objects = objects
        self._waiting: list[step_line.StepLine] = []
        self._uploaded: dict[int, int] | None = None  # the last step of each generation

    def upload(self, *, others_upload: bool = False) -> None:
        """Upload the new lines. Raises StoreFailed; then the next call continues.

        others_upload: another process uploads lines of the same file, so the store is listed again.
        """
        with suppress(OSError):  # what cannot be read now is left for the next call
            self._waiting.extend(log.parse_lines(self._file.lines_to_end(), step_line.parse))
        if not self._waiting:
            return
        if self._uploaded is None or others_upload:
            self._uploaded = upload_parts.uploaded_steps(self._objects.listed(upload_parts.METRICS))
        found: dict[int, list[step_line.StepLine]] = {}
        for line in self._waiting:
            if line.step > self._uploaded.get(line.generation, 0):
                found.setdefault(line.generation, []).append(line)
        for generation, lines in found.items():
            for begin in range(0, len(lines), _LINES_PER_PART):
                batch = lines[begin : begin + _LINES_PER_PART]
                first, last = batch[0].step, batch[-1].step
                text = "".join(json.dumps(line.to_json()) + "\n" for line in batch)
                # A part that exists is ours, from a try whose answer was lost: it has the same
                # lines.
                name = upload_parts.metrics_part_name(generation, first, last, self._node)
                self._objects.create(name, text.encode())
                self._uploaded[generation] = last
        self._waiting = []


class LogShipper:
    """The thread that uploads what one node writes, and what the killed agents of its folder left.

    The local folder is that of the run's `uid` (provenance.py): none of another run is in it.
    """

    def __init__(
        self, run: RunDir, node: str, *, is_first: Callable[[], bool], print_line: Callable[[str], None]
    ) -> None:
        """is_first: whether this node has rank 0, whose metrics are the run's."""
        self._run, self._node, self._is_first, self._print_line = run, node, is_first, print_line
        self._objects = Objects(run.url, limit_s=PART_LIMIT_S)
        self._bytes: dict[str, int] | None = None  # of each file, that are uploaded
        self._lines: dict[Path, MetricsShipper] = {}
        self._clock = SystemClock()
        self._closing = threading.Event()
        self._ends_s = inf
        self._has_arrived = False  # everything, at the end
        self._problem = ""  # of the last try
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, within_s: float = CLOSE_WITHIN_S) -> str:
        """Upload the rest, in that time at most.

        Returns a sentence for the user, empty where everything arrived.
        """
        if not self._thread.is_alive():
            return ""
        self._ends_s = self._clock.monotonic() + within_s
        self._closing.set()
        self._thread.join(within_s)
        if self._has_arrived:
            return ""
        return (
            f"the last events and metrics of this node have not reached {self._run.url} ({self._problem or 'no answer'}), so that report and status lack them; "
            f"they stay in {self._run.local}, and the same command uploads them from there"
        )

    def upload(self) -> bool:
        """Upload new bytes; returns whether that was everything. Raises StoreFailed, OSError."""
        # Events before metrics: a reader that finds a step must find the event that says which
        # state its generation restored.
        is_done = self._upload_files()
        for path in _with_suffix(self._run.copies, ".jsonl"):
            if path.name[0] != "." and (path.stem != self._node or self._is_first()):
                self._lines.setdefault(path, MetricsShipper(path, path.stem, self._objects)).upload()
        return is_done

    def _upload_files(self) -> bool:
        """The events and logs, in parts that are known by their offset in the file."""
        if self._bytes is None:
            listed = self._objects.listed(upload_parts.EVENTS) | self._objects.listed(upload_parts.LOGS)
            sizes = {name: about.size_bytes for name, about in listed.items()}
            self._bytes = upload_parts.uploaded_bytes(sizes)
        logs = (path for folder in listing(self._run.logs) for path in _with_suffix(folder, ".log"))
        for path in [*_with_suffix(self._run.events, ".jsonl"), *logs]:
            source = path.relative_to(self._run.local).as_posix()
            while data := _whole_lines(path, at := self._bytes.get(source, 0)):
                if not self._objects.create(upload_parts.part_name(source, at), data):
                    # Another agent in this folder uploaded it, or the answer to an earlier try was
                    # lost. What the store has is listed again with the next call.
                    self._bytes = None
                    return False
                self._bytes[source] = at + len(data)
        return True

    def _work(self) -> None:
        pause_s, began_s = 0.0, self._clock.monotonic()
        while not self._closing.wait(pause_s):
            had_failed, age_s = self._problem, self._clock.monotonic() - began_s
            pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, age_s * _PAUSE_PER_AGE))
            self._try()
            if self._problem and not had_failed:
                self._print_line(
                    f"events and metrics do not reach the run directory ({self._problem}); they stay on this node, training goes on, and the upload is tried again"
                )
            elif had_failed and not self._problem:
                self._print_line("events and metrics reach the run directory again")
        while not self._try() and self._clock.monotonic() < self._ends_s:
            self._clock.sleep(TICK_S)

    def _try(self) -> bool:
        """Returns whether everything has arrived."""
        self._has_arrived = False
        try:
            self._has_arrived, self._problem = self.upload(), ""
        except Exception as error:
            # The thread's edge. If the thread died of a store that does not answer, a full disk or
            # a bug, the run's report would end here, and no message would say so.
            self._problem = str(error)
        return self._has_arrived


def upload_left_behind(run: RunDir, within_s: float = CLOSE_WITHIN_S) -> str:
    """Upload what killed or cut off agents of a run left in its local folder; as of `close`."""
    shipper = LogShipper(run, "", is_first=lambda: False, print_line=lambda text: None)
    shipper.start()
    return shipper.close(within_s)


def _with_suffix(folder: Path, suffix: str) -> list[Path]:
    return [path for path in listing(folder) if path.suffix == suffix]


def _whole_lines(path: Path, position: int) -> bytes:
    """What follows in a file, up to the end of a line or a limit."""
    data = read_from(path, position, PART_BYTES)
    end = data.rfind(b"\n") + 1
    # Each part is taken apart into lines by itself. Only a line that is longer than a part is cut.
    return data[:end] if end or len(data) < PART_BYTES else data
