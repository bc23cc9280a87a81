"""A command that only reads a run prints all that it found, as tables or as one JSON object.

The runs stay as they are. Nothing here imports torch, which would take longer than most commands.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

from rich.console import Console

from elastic.config import identity
from elastic.config.identity import Identity
from elastic.config.options import Inspection
from elastic.config.parent import Parent
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, UsageError
from elastic.observe import metrics
from elastic.observe.log import read_events
from elastic.observe.read_columns import read_columns
from elastic.rendezvous.backends.heartbeat_ages import heartbeat_ages_s
from elastic.report import tables
from elastic.report.diff import compare
from elastic.report.download import readable
from elastic.report.report import summarise
from elastic.report.status import status
from elastic.report.verify import verify_run
from elastic.storage.remote import check_url
from elastic.storage.store import SMALL_LIMIT_BYTES
from elastic.system.clock import SystemClock
from elastic.system.files import open_regular

# The frozen result of a command, whose fields are the keys of its JSON; what it shows of the result
# without --json; and whether the runs are as they should be.
Answer = tuple[Any, Any, bool]


def inspect(inspection: Inspection) -> int:
    """Do what the command line asks for, and return the exit code."""
    runs = [RunDir.parse(text) for text in inspection.runs]
    with ExitStack() as stack:
        try:
            if inspection.command != "verify":  # it reads checkpoints where they are
                for run in runs:
                    check_url(run.url)
                runs = [stack.enter_context(readable(run)) for run in runs]
            found, shown, is_good = _COMMANDS[inspection.command](*runs)
        except OSError as error:
            raise UsageError(
                f"expected files of a run that can be read, found: {error}; try again"
            ) from error
        if inspection.as_json:
            print(json.dumps(asdict(found), indent=2))
        else:
            Console(highlight=False).print(shown, soft_wrap=True)
    return EXIT_COMPLETE if is_good else EXIT_FAILED


def _report(run: RunDir) -> Answer:
    found = summarise(read_events(run.events), read_columns(run.metrics), _parent(run))
    return found, tables.report_tables(run.url, found), True


def _parent(run: RunDir) -> Parent | None:
    found = _identity(run, "the report reads there what the run descends from")
    return None if found is None else found.parent


def _begun_with(run: RunDir) -> Identity | None:
    """It explains a difference and makes none: what cannot be read is left out."""
    with suppress(UsageError, OSError):
        return _identity(run, "the comparison reads there what the run was begun with")
    return None


def _identity(run: RunDir, remedy: str) -> Identity | None:
    with suppress(FileNotFoundError), open_regular(run.local / identity.NAME, follow=True) as file:
        return identity.parse(file.read(SMALL_LIMIT_BYTES + 1), remedy=remedy)
    return None


def _status(run: RunDir) -> Answer:
    now = SystemClock().wall()
    ages_s = heartbeat_ages_s(run.rendezvous_url, now=now)
    found = status(read_events(run.events), metrics.newest(run.metrics), ages_s, now)
    return found, tables.status_tables(run.url, found), True


def _diff(a: RunDir, b: RunDir) -> Answer:
    lines_a, lines_b = metrics.read(a.metrics), metrics.read(b.metrics)
    report_a = summarise(read_events(a.events), lines_a)
    report_b = summarise(read_events(b.events), lines_b)
    found = compare(report_a, lines_a, report_b, lines_b, (_begun_with(a), _begun_with(b)))
    return found, tables.diff_text(found), found.same


def _verify(run: RunDir) -> Answer:
    found = verify_run(run, SystemClock())
    return found, tables.verify_text(run.url, found), not found.damage


_COMMANDS: dict[str, Callable[..., Answer]] = {
    "report": _report,
    "status": _status,
    "verify": _verify,
    "diff": _diff,
}
