"""A command that only reads a run prints all that it found, as tables or as one JSON object,
or writes it as one page.

The runs stay as they are. Nothing here imports torch, which would take longer than most commands;
tables are imported where they are shown.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from types import ModuleType
from typing import Any

from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, StoreFailed
from elastic.observe.log import read_events
from elastic.observe.reader import read_newest, read_run
from elastic.observe.run_view import view_of
from elastic.observe.step_reader import StepReader
from elastic.report.chains import StepChains
from elastic.report.diff import ComparedRun, Difference, compare, compared_run
from elastic.report.download import readable, unreadable
from elastic.report.html_page import write_page
from elastic.report.page import page_of, page_of_two
from elastic.report.report import report_of, status_of
from elastic.report.verify import verify_run
from elastic.report.views import begun_with, heartbeat_ages_s, parent_of, view_now
from elastic.storage.remote import check_url
from elastic.system.clock import SystemClock

# The frozen result of a command, whose fields are the keys of its JSON; what it shows of the result
# without --json, made by the module `tables`; and whether the runs are as they should be.
Answer = tuple[Any, Callable[[ModuleType], Any], bool]


def inspect(command: str, *urls: str, as_json: bool, html: str | None = None) -> int:
    """Do what a command line asks for that only reads runs, and return the exit code.

    html: the file that gets the page of `report` or `diff`.
    """
    runs = [RunDir.parse(text) for text in urls]
    with ExitStack() as stack:
        try:
            if command != "verify":  # it reads checkpoints where they are
                for run in runs:
                    check_url(run.url)
                runs = [stack.enter_context(readable(run)) for run in runs]
            if html is not None:
                return _draw(html, runs)
            found, shown, is_good = _COMMANDS[command](*runs)
        except OSError as error:
            raise unreadable(error) from error
        if as_json:
            print(json.dumps(asdict(found), indent=2))
        else:
            from elastic.report import tables

            tables.show(shown(tables))
    return EXIT_COMPLETE if is_good else EXIT_FAILED


def _draw(html: str, runs: list[RunDir]) -> int:
    """The page of one run, or of two; two that differ give the exit code of `diff`."""
    pages = [page_of(run.url, view_now(run)) for run in runs]
    if len(pages) == 1:
        print(write_page(pages[0], html))
        return EXIT_COMPLETE
    found = compare_runs(*runs)
    print(f"{found.reason}\n{write_page(page_of_two(found, *pages), html)}")
    return EXIT_COMPLETE if found.same else EXIT_FAILED


def _report(run: RunDir) -> Answer:
    record = read_run(run)
    ages_s: Mapping[str, float] = {}
    with suppress(StoreFailed):  # what it would say is how long the run has stood still
        ages_s = heartbeat_ages_s(run.rendezvous_url)
    view = view_of(record, ages_s, parent_of(run))
    return report_of(view), lambda tables: tables.report_tables(run.url, view), True


def _status(run: RunDir) -> Answer:
    record = read_newest(run)
    view = view_of(record, heartbeat_ages_s(run.rendezvous_url))
    return status_of(view), lambda tables: tables.status_tables(run.url, view), True


def _diff(a: RunDir, b: RunDir) -> Answer:
    found = compare_runs(a, b)
    return found, lambda tables: tables.diff_text(found), found.same


def compare_runs(a: RunDir, b: RunDir) -> Difference:
    """Each line is read once, and none is kept. Raises OSError."""
    return compare(*_compared(a), *_compared(b), (begun_with(a), begun_with(b)))


def _compared(run: RunDir) -> tuple[ComparedRun, StepChains]:
    # Events first: the steps that they tell of are in the metrics by then.
    events, chains = read_events(run.events), StepChains()
    with closing(StepReader(run.metrics)) as reader:
        for batch in reader.batches():
            if batch is not None:
                chains.add(batch)
    return compared_run(events, chains), chains


def _verify(run: RunDir) -> Answer:
    found = verify_run(run, SystemClock())
    return found, lambda tables: tables.verify_text(run.url, found), not found.damage


_COMMANDS: dict[str, Callable[..., Answer]] = {
    "report": _report,
    "status": _status,
    "verify": _verify,
    "diff": _diff,
}
