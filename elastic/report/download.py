"""A run that lies in an object store is read like one in a folder: its parts are put together in a temporary one.

It does not promise the newest seconds, which may not have been carried yet.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic.config.identity import NAME
from elastic.config.run_dir import RunDir
from elastic.errors import StoreFailed, UsageError
from elastic.events import is_event
from elastic.observe import upload_parts
from elastic.observe.log import as_record
from elastic.observe.metrics import is_step
from elastic.storage.objects import Objects, ObjectsFailed

Record = dict[str, Any]

CALL_LIMIT_S = 120.0


@contextmanager
def readable(run: RunDir) -> Iterator[RunDir]:
    """The run as a folder: itself, or a copy that is there as long as the context. Raises UsageError when there is none, StoreFailed when the store does not answer."""
    if not run.is_remote:
        if not run.local.is_dir():
            raise UsageError(
                f"expected a run directory, found nothing at {run.local}; elastic-train RECIPE --run-dir names one"
            )
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="elastic-run-") as folder:
        local = RunDir(url=run.url, local=Path(folder))
        try:
            _download(Objects(run.url, limit_s=CALL_LIMIT_S), local)
        except ObjectsFailed as error:
            raise StoreFailed(str(error)) from error
        yield local


def _download(objects: Objects, run: RunDir) -> None:
    # Events behind metrics: of a step that is there, what its generation restored is there too.
    metrics_parts, events_parts = objects.listed(upload_parts.METRICS), objects.listed(upload_parts.EVENTS)
    if not events_parts and objects.read(NAME) is None:
        raise UsageError(
            f"expected a run at {run.url}, found nothing there; elastic-train RECIPE --run-dir names one"
        )
    lines = list(filter(is_step, _records(objects.read_all(sorted(metrics_parts)))))
    events = list(filter(is_event, _records(objects.read_all(sorted(events_parts)))))
    kept, lost = upload_parts.merge(lines, upload_parts.restored_steps(events))
    run.events.mkdir(parents=True)
    _write(run.events / "all.jsonl", upload_parts.with_losses(events, lost))
    _write(run.metrics, kept)


def _records(data: Mapping[str, bytes]) -> list[Record]:
    """The JSON objects of all parts, by the parts' names; a line that is none is left out."""
    found = (as_record(line) for name in sorted(data) for line in data[name].splitlines())
    return [record for record in found if record is not None]


def _write(path: Path, records: list[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
