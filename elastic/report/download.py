"""A run in an object store is read like one in a folder: a temporary folder with its parts.

It does not promise the newest seconds, which the nodes may not have uploaded yet.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from elastic.config.identity import NAME
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.events import Event, Restored
from elastic.observe import logged_event, step_line, upload_parts
from elastic.observe.log import parse_lines
from elastic.observe.logged_event import LoggedEvent, of_kind
from elastic.observe.step_line import StepLine
from elastic.storage.remote import Objects

CALL_LIMIT_S = 120.0


def check_exists(run: RunDir) -> None:
    """Raises UsageError for a folder that has nothing of a run; of a URL nothing is known yet."""
    parts = run.local / NAME, run.events, run.rendezvous, run.local / "checkpoints"
    if not run.is_remote and not any(part.exists() for part in parts):
        raise UsageError(
            f"expected a run directory, found no run in {run.local}; give what --run-dir named when it began"
        )


def nothing_at(objects: Objects) -> UsageError:
    """For a URL that has no run, and perhaps no bucket."""
    return UsageError(
        f"expected a run at {objects.url}, found nothing there; give what --run-dir named when it began"
    )


@contextmanager
def readable(run: RunDir) -> Iterator[RunDir]:
    """The run as a folder: itself, or a copy that exists as long as the context.

    Raises UsageError when there is no run, StoreFailed when the store does not answer.
    """
    if not run.is_remote:
        check_exists(run)
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="elastic-run-") as folder:
        local = RunDir(url=run.url, local=Path(folder))
        _download(Objects(run.url, limit_s=CALL_LIMIT_S), local)
        yield local


def _download(objects: Objects, run: RunDir) -> None:
    # Events are listed after metrics, and uploaded before them. So if a step is found, the event
    # that says what its generation restored is found as well; without it the step could not be
    # placed.
    metrics_parts, events_parts = objects.listed(upload_parts.METRICS), objects.listed(upload_parts.EVENTS)
    identity = objects.read(NAME)
    if not events_parts and identity is None:
        raise nothing_at(objects)
    lines = parse_lines(_lines(objects, metrics_parts), step_line.parse)
    events = logged_event.in_order(parse_lines(_lines(objects, events_parts), logged_event.parse))
    restored = {each.generation: each.event.step for each in of_kind(events, Restored)}
    kept, lost = upload_parts.merge(lines, restored)
    run.events.mkdir(parents=True)
    changed = [each.changed for each in (*metrics_parts.values(), *events_parts.values())]
    changed_s = max((each for each in changed if each is not None), default=0.0)
    if identity is not None:
        (run.local / NAME).write_bytes(identity)
    _write(run.events / "all.jsonl", upload_parts.with_losses(events, lost))
    _write(run.metrics, kept)
    for path in (run.events / "all.jsonl", run.metrics):  # as old as what they were made of
        os.utime(path, (changed_s, changed_s))


def _lines(objects: Objects, parts: Iterable[str]) -> Iterator[bytes]:
    """The lines of all parts, in the order of the parts' names."""
    data = objects.read_all(sorted(parts))
    return (line for name in sorted(data) for line in data[name].splitlines())


def _write(path: Path, lines: Sequence[StepLine | LoggedEvent[Event]]) -> None:
    path.write_text("".join(json.dumps(line.to_json()) + "\n" for line in lines))
