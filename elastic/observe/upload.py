"""What a node writes line by line is in the run's store a few seconds later, and nothing waits for it but the end of the agent, for a bounded time.

It does not promise that the newest seconds survive the machine. The steps up to a checkpoint do: the uploader carries their lines before it commits. Where it fails, it is said
once and tried again.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from elastic.config.run_dir import RunDir
from elastic.observe import step_line, upload_parts
from elastic.observe.log import parse_lines
from elastic.observe.step_line import StepLine
from elastic.storage.objects import Objects
from elastic.system.clock import Clock
from elastic.system.growing_file import GrowingFile, read_from

TICK_S = 0.5
FAILED_PAUSE_S = 10.0
CLOSE_WITHIN_S = 15.0
PART_LIMIT_S = 30.0
PART_BYTES = 4 * 1024 * 1024
_LINES_PER_PART = 5000
_ROUNDS_AT_THE_END = 3


class MetricsUpload:
    """The metrics of one node on their way to the store."""

    def __init__(self, path: Path, node: str, objects: Objects) -> None:
        self._file = GrowingFile(path)
        self._node = node
        self._objects = objects
        self._waiting: list[StepLine] = []
        self._there: dict[int, int] | None = None

    def upload(self, *, others_upload: bool = False) -> None:
        """`others_upload`: somebody else may have carried some of the same lines since. Raises StoreFailed; then the next call goes on."""
        with suppress(OSError):  # what cannot be read is left for the next call
            self._waiting.extend(parse_lines(self._file.lines_to_end(), step_line.parse))
        if not self._waiting:
            return
        if self._there is None or self._file.started_over or others_upload:
            self._there = upload_parts.uploaded_steps(self._objects.listed(upload_parts.METRICS))
        for generation, missing in upload_parts.not_uploaded(self._waiting, self._there).items():
            for begin in range(0, len(missing), _LINES_PER_PART):
                batch = missing[begin : begin + _LINES_PER_PART]
                first, last = batch[0].step, batch[-1].step
                text = "".join(json.dumps(line.to_json()) + "\n" for line in batch)
                # Taken by an earlier try of ours, with the same lines.
                self._objects.create(
                    upload_parts.metrics_part_name(generation, first, last, self._node), text.encode()
                )
                self._there[generation] = last
        self._waiting = []


class FilesUpload:
    """The events and logs below a run's local folder on their way to the store."""

    def __init__(self, run: RunDir, objects: Objects, *, ignored: frozenset[Path]) -> None:
        self._run = run
        self._objects = objects
        self._ignored = ignored
        self._ends: dict[str, int] | None = None

    def upload(self) -> bool:
        """Whether everything that is written is carried. Raises StoreFailed."""
        if self._ends is None:
            listed = self._objects.listed(upload_parts.EVENTS) | self._objects.listed(upload_parts.LOGS)
            self._ends = upload_parts.uploaded_bytes(
                {name: about.size_bytes for name, about in listed.items()}
            )
        for path in [*self._run.events.glob("*.jsonl"), *self._run.logs.glob("*/*.log")]:
            if path not in self._ignored and not self._upload(path, self._ends):
                # Somebody else carried some of this file, or an answer was lost: look again what is there.
                self._ends = None
                return False
        return True

    def _upload(self, path: Path, ends: dict[str, int]) -> bool:
        source = path.relative_to(self._run.local).as_posix()
        while data := _whole_lines(path, ends.get(source, 0)):
            if not self._objects.create(upload_parts.part_name(source, ends.get(source, 0)), data):
                return False
            ends[source] = ends.get(source, 0) + len(data)
        return True


class LogUploader:
    """The thread of one node; start it with `start`, end it with `close`."""

    def __init__(
        self,
        run: RunDir,
        node: str,
        *,
        is_first: Callable[[], bool],
        is_new: bool,
        clock: Clock,
        report: Callable[[str], None],
    ) -> None:
        """is_first: whether this node has rank 0, whose metrics are the run's. is_new: what lies in the local folder by now is of another run that had the same URL."""
        objects = Objects(run.url, limit_s=PART_LIMIT_S)
        there = frozenset([*run.local.glob("*/*.jsonl"), *run.local.glob("*/*/*.log")])
        left = [path for path in sorted(run.copies.glob("*.jsonl")) if path.stem != node]
        self._files = FilesUpload(run, objects, ignored=there if is_new else frozenset())
        self._left = [] if is_new else [MetricsUpload(path, path.stem, objects) for path in left]
        self._lines = MetricsUpload(run.metrics_of(node), node, objects)
        # The agent and its uploader write down what matters at once, and little else: generations, deaths, checkpoints.
        self._noteworthy = [run.events / f"{node}-{who}.jsonl" for who in ("agent", "uploader")]
        self._is_first = is_first
        self._clock = clock
        self._report = report
        self._began_s = clock.monotonic()
        self._has_failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_until_closed, name="uploads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Carry what is left, for 15 s at most."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_WITHIN_S)

    def _run_until_closed(self) -> None:
        due_s, seen_bytes = 0.0, 0
        while not self._closing.wait(TICK_S):
            size_bytes = sum(map(_size_bytes, self._noteworthy))
            now_s = self._clock.monotonic()
            if now_s < due_s and (size_bytes == seen_bytes or self._has_failed):
                continue
            self._try()
            seen_bytes = size_bytes
            pause_s = FAILED_PAUSE_S if self._has_failed else upload_parts.pause_s(now_s - self._began_s)
            due_s = self._clock.monotonic() + pause_s
        for _ in range(_ROUNDS_AT_THE_END):
            if self._try():
                break

    def _try(self) -> bool:
        """Whether everything is carried."""
        try:
            while self._left:
                self._left[-1].upload()
                self._left.pop()
            # Events first, so that nobody finds a step whose generation is not known to have restored anything.
            is_done = self._files.upload()
            if self._is_first():
                self._lines.upload()
        except Exception as error:
            # The thread's edge: were it to die of a store that is away, a full disk or a bug, the run's report would end here without a word.
            self._report_failure(error)
            return False
        if self._has_failed:
            self._report("events and metrics reach the run directory again")
        self._has_failed = False
        return is_done

    def _report_failure(self, error: Exception) -> None:
        if not self._has_failed:
            self._report(
                f"events and metrics do not reach the run directory ({error}); they stay here, training goes on, and it is tried again"
            )
        self._has_failed = True


def _whole_lines(path: Path, position: int) -> bytes:
    """What follows in a file, up to the end of a line or a limit."""
    try:
        data = read_from(path, position, PART_BYTES)
    except OSError:
        return b""
    return data if len(data) == PART_BYTES else data[: data.rfind(b"\n") + 1]


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
