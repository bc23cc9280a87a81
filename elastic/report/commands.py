"""A command that only reads a run prints all that it found, as tables or as one JSON object,
or writes it as one page. It returns the exit code, and raises OSError, UsageError and StoreFailed.

The runs stay as they are. Nothing here imports torch, which would take longer than most commands.
"""

import json
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import RenderableType

from elastic.checkpoint import catalog
from elastic.config import identity
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, UsageError
from elastic.observe.reader import RunReader
from elastic.report import figures, html_page, page, tables
from elastic.report.diff import ComparedRun, Difference, StepChains, compare
from elastic.report.views import CALL_LIMIT_S, check_exists, identity_of, nothing_at, readable, view_now
from elastic.storage.remote import Objects, open_store
from elastic.storage.store import read_small
from elastic.system.clock import Clock, SystemClock
from elastic.system.untrusted import printable


def _print(found: Any, shown: RenderableType, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2, default=asdict))
    else:
        tables.show(shown)


def report(url: str, *, as_json: bool, html: str | None) -> int:
    """html: the file that gets the page; so with `diff`."""
    with readable(RunDir.parse(url)) as run:
        view = view_now(run, curves=html is not None)
    if html is not None:
        print(html_page.write_page(page.page_of(run.url, view), html))
    else:
        _print(figures.report_json(view), tables.report_tables(run.url, view), as_json=as_json)
    return EXIT_COMPLETE


def status(url: str, *, as_json: bool) -> int:
    with readable(RunDir.parse(url)) as run:
        view = view_now(run, newest=True)
    _print(figures.status_json(view), tables.status_tables(run.url, view), as_json=as_json)
    return EXIT_COMPLETE


def diff(a: str, b: str, *, as_json: bool, html: str | None) -> int:
    with readable(RunDir.parse(a)) as run_a, readable(RunDir.parse(b)) as run_b:
        found = compare_runs(run_a, run_b)
        if html is not None:
            pages = [page.page_of(run.url, view_now(run, curves=True)) for run in (run_a, run_b)]
            said = html_page.write_page(page.page_of_two(found, *pages), html)
            print(f"{printable(found.reason)}\n{said}")
        else:
            _print(found, tables.cell(found.text()), as_json=as_json)
    return EXIT_COMPLETE if found.same else EXIT_FAILED


def verify(url: str, *, as_json: bool) -> int:
    found = verify_run(RunDir.parse(url), SystemClock())
    _print(found, tables.cell(found.text(url)), as_json=as_json)
    return EXIT_FAILED if found.damage else EXIT_COMPLETE


def compare_runs(a: RunDir, b: RunDir) -> Difference:
    """Each line is read once, and none is kept. Raises OSError."""
    found = compare(*_compared(a), *_compared(b))
    with suppress(UsageError, OSError):  # it explains a difference, and makes none
        begun = [each for each in map(identity_of, (a, b)) if each is not None]
        return replace(found, settings=identity.differences(*begun)) if len(begun) == 2 else found
    return found


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
    damage: list[catalog.Damage]

    def text(self, name: str) -> str:
        if self.damage:
            return "\n".join(
                [f"{name}: damaged", *(f"  step {each.step}: {each.reason}" for each in self.damage)]
            )
        if not self.committed:
            return (
                f"{name}: no checkpoint was committed (a script that does not import elastic keeps its own)"
            )
        steps = ", ".join(map(str, self.committed))
        return f"{name}: no damage; every checkpoint is as it was committed (steps {steps})"


def verify_run(run: RunDir, clock: Clock) -> Verification:
    """Reads every committed checkpoint whole, and repairs nothing.

    Raises UsageError when there is no run, StoreFailed when the store does not answer.
    """
    check_exists(run)
    store = open_store(run.checkpoints_url)
    records, _ = catalog.list_commits(store, clock)
    data = read_small(open_store(run.url), identity.NAME, clock)
    if run.is_remote and not records and data is None:
        objects = Objects(run.url, limit_s=CALL_LIMIT_S)
        if not objects.directly_below(""):
            raise nothing_at(objects)
    run_id = "" if data is None else identity.parse(data).run_id
    steps = sorted({record.step for record in records})
    return Verification(committed=steps, damage=catalog.verify(store, clock, run_id))
