"""A command that only reads a run prints all that it found, as tables or as one JSON object,
or writes it as one page.

The runs stay as they are. Nothing here imports torch, which would take longer than most commands.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType

from elastic.checkpoint.catalog import Damage, list_commits, verify
from elastic.config import identity
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED
from elastic.observe.reader import RunReader
from elastic.report import tables
from elastic.report.diff import ComparedRun, Difference, StepChains, compare
from elastic.report.download import CALL_LIMIT_S, check_exists, nothing_at, readable, unreadable
from elastic.report.figures import report_json, status_json
from elastic.report.html_page import write_page
from elastic.report.page import page_of, page_of_two
from elastic.report.views import begun_with, view_now
from elastic.storage.remote import Objects, check_url, open_store
from elastic.storage.store import read_small
from elastic.system.clock import Clock, SystemClock

# What `--json` prints; the text without it; and whether the runs are as they should be.
_Answer = tuple[Any, RenderableType, bool]


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
            print(json.dumps(found, indent=2, default=asdict))
        else:
            tables.show(shown)
    return EXIT_COMPLETE if is_good else EXIT_FAILED


def _draw(html: str, runs: list[RunDir]) -> int:
    """The page of one run, or of two; two that differ give the exit code of `diff`."""
    pages = [page_of(run.url, view_now(run, curves=True)) for run in runs]
    if len(pages) == 1:
        print(write_page(pages[0], html))
        return EXIT_COMPLETE
    found = compare_runs(*runs)
    print(f"{found.reason}\n{write_page(page_of_two(found, *pages), html)}")
    return EXIT_COMPLETE if found.same else EXIT_FAILED


def _report(run: RunDir) -> _Answer:
    view = view_now(run)
    return report_json(view), tables.report_tables(run.url, view), True


def _status(run: RunDir) -> _Answer:
    view = view_now(run, newest=True)
    return status_json(view), tables.status_tables(run.url, view), True


def _diff(a: RunDir, b: RunDir) -> _Answer:
    found = compare_runs(a, b)
    return found, tables.cell(found.text()), found.same


def compare_runs(a: RunDir, b: RunDir) -> Difference:
    """Each line is read once, and none is kept. Raises OSError."""
    return compare(*_compared(a), *_compared(b), (begun_with(a), begun_with(b)))


def _compared(run: RunDir) -> tuple[ComparedRun, StepChains]:
    chains = StepChains()
    with closing(RunReader(run)) as reader:
        events = reader.read_events()
        for batch in reader.new_steps():
            chains.add(batch)
    return ComparedRun.of(events, chains), chains


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The fields are the keys of `verify --json`; `committed`: the steps of all commit records.

    A checkpoint without damage is one whose bytes a restore accepts: it is the state that its
    record names. Whether that state fits a recipe's objects, only the recipe can tell.
    """

    committed: list[int]
    damage: list[Damage]

    def text(self, name: str) -> str:
        if self.damage:
            return "\n".join(
                [f"{name}: damaged", *(f"  step {each.step}: {each.reason}" for each in self.damage)]
            )
        if not self.committed:
            return f"{name}: no checkpoint was committed yet"
        steps = ", ".join(map(str, self.committed))
        return f"{name}: no damage; every checkpoint is as it was committed (steps {steps})"


def verify_run(run: RunDir, clock: Clock) -> Verification:
    """Reads every committed checkpoint whole, and repairs nothing.

    Raises UsageError when there is no run, StoreFailed when the store does not answer.
    """
    check_exists(run)
    store = open_store(run.checkpoints_url)
    records, _ = list_commits(store, clock)
    data = read_small(open_store(run.url), identity.NAME, clock)
    if run.is_remote and not records and data is None:
        objects = Objects(run.url, limit_s=CALL_LIMIT_S)
        if not objects.directly_below(""):
            raise nothing_at(objects)
    run_id = "" if data is None else identity.parse(data).run_id
    return Verification(
        committed=sorted({record.step for record in records}), damage=verify(store, clock, run_id)
    )


def _verify(run: RunDir) -> _Answer:
    found = verify_run(run, SystemClock())
    return found, tables.cell(found.text(run.url)), not found.damage


_COMMANDS: dict[str, Callable[..., _Answer]] = {
    "report": _report,
    "status": _status,
    "verify": _verify,
    "diff": _diff,
}
