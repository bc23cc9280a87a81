"""A run live in a terminal: where it stands, what it does, and what happened lately.

It reads the run's files again and again, less often where that takes longer, and changes nothing.
It ends when the run has finished or failed; a run that was interrupted may go on.
"""

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from statistics import median

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic import events as kinds
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, ElasticError, UsageError
from elastic.observe.goodput import DOWN, END, TimeSpent, time_spent
from elastic.observe.incidents import text_of
from elastic.observe.logged_event import Events
from elastic.observe.loss_words import loss_words
from elastic.observe.recovery_line import recovery_line
from elastic.observe.slow_ranks import SlowRank, slow_ranks
from elastic.observe.step_columns import StepColumns
from elastic.rendezvous.backends.heartbeat_ages import heartbeat_ages_s
from elastic.report.download import readable
from elastic.report.facts import plain_facts
from elastic.report.polling import folder_id, pause_s
from elastic.report.run_reader import ReadFiles, RunReader, status_now
from elastic.report.shards import shards_by_rank, shards_text
from elastic.report.status import Status
from elastic.report.words import count, duration, short
from elastic.storage.remote import check_url
from elastic.system.clock import SystemClock, time_of_day

PAUSE_S, REMOTE_PAUSE_S = 1.0, 5.0
_NICENESS = 10
_RECENT_STEPS = 50
_MOST_EVENTS = 8
_MOST_WORKERS = 16
_OVER = ("finished", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much of a view is drawn. workers, events: rows at most; the newest events are kept.

    details: whether it says what time was lost to, and which ranks are slow. columns: of the
    terminal.
    """

    workers: int = _MOST_WORKERS
    events: int = _MOST_EVENTS
    details: bool = True
    columns: int = 80


# A terminal with few lines: the workers give way first, the newest event last.
_ROOMS = (
    *(Room(workers=workers) for workers in (_MOST_WORKERS, 8, 4, 2, 0)),
    *(Room(workers=0, events=events) for events in (5, 3)),
    *(Room(workers=0, events=events, details=False) for events in (5, 3, 2, 1)),
)
_NARROW_COLUMNS = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the terminal shows of a run. step_s: the median of the newest steps, in seconds.

    shards: of each rank, empty where none was moved. lately: (seconds since 1970, node, what
    happened), oldest first.
    """

    name: str
    status: Status
    loss: object
    step_s: float | None
    spent: TimeSpent | None
    slow: list[SlowRank]
    shards: list[int]
    lately: list[tuple[float, str, str]]

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, at the pace of the newest ones; None while nobody trains."""
        if self.step_s is None or self.status.steps is None or not self.status.world_size:
            return None
        return (self.status.steps - self.status.step) * self.step_s


def watch(url: str, *, once: bool) -> int:
    """Show the run until it is over, or one time. Raises UsageError, StoreFailed."""
    run, console = RunDir.parse(url), Console(highlight=False)
    check_url(run.url)
    if once:
        with closing(RunReader(run)) as reader:
            console.print(drawn(_first_look(run, reader)))
        return EXIT_COMPLETE
    if not console.is_terminal:
        raise UsageError("expected a terminal to watch in, found none; --once prints the view one time")
    with closing(RunReader(run)) as reader:
        _show(run, reader, console)
    return EXIT_COMPLETE


def _show(run: RunDir, reader: RunReader, console: Console) -> None:
    clock = SystemClock()
    os.nice(_NICENESS)
    view = _first_look(run, reader)  # a run that is not there is said before the screen changes
    # Ctrl-C is the way to leave.
    with (
        suppress(KeyboardInterrupt),
        Live(fitted(view, console), console=console, auto_refresh=False) as live,
    ):
        while view.status.state not in _OVER:
            began_s = clock.monotonic()
            problem: list[Text] = []
            try:
                view = _look(run, reader)
            except (OSError, ElasticError) as error:
                problem = [Text(f"cannot be read now, and is tried again: {short(str(error))}")]
            live.update(fitted(view, console, problem), refresh=True)
            taken_s = clock.monotonic() - began_s
            least_s = REMOTE_PAUSE_S if run.is_remote else PAUSE_S
            until_s = clock.monotonic() + pause_s(taken_s, least_s=least_s, is_remote=run.is_remote)
            place = folder_id(run.local)
            while (left_s := until_s - clock.monotonic()) > 0 and folder_id(run.local) == place:
                clock.sleep(min(left_s, PAUSE_S))


def _first_look(run: RunDir, reader: RunReader) -> View:
    """Raises UsageError, StoreFailed."""
    try:
        return _look(run, reader)
    except OSError as error:
        raise UsageError(f"expected files of a run that can be read, found: {error}; try again") from error


def _look(run: RunDir, reader: RunReader) -> View:
    """Raises OSError, UsageError, StoreFailed."""
    ages_s = heartbeat_ages_s(run.rendezvous_url)
    with readable(run) as there:
        if run.is_remote:  # a copy is read whole
            with closing(RunReader(there)) as own:
                files = own.read()
        else:
            files = reader.read()
        found, now_s = status_now(there, files.events, files.newest, ages_s)
    return view_of(run.url, files, found, now_s)


def view_of(name: str, files: ReadFiles, found: Status, now_s: float) -> View:
    """now_s: seconds since 1970."""
    events, trained = files.events, files.trained
    recent = trained.seconds[-_RECENT_STEPS:]
    return View(
        name=name,
        status=found,
        loss=None if files.newest is None else files.newest.loss,
        step_s=median(recent) if recent else None,
        spent=time_spent(events, trained, now_s if found.state == "running" else None),
        slow=slow_ranks(events, trained.paces),
        shards=shards_by_rank(events),
        lately=_lately(events, trained),
    )


def _lately(events: Events, trained: StepColumns) -> list[tuple[float, str, str]]:
    found: list[tuple[float, str, str]] = []
    for each in sorted(events, key=lambda each: each.time)[::-1]:
        if text := _text(events, trained, each.event, each.generation):
            found.append((each.time, each.node, text))
        if len(found) == _MOST_EVENTS:
            break
    return found[::-1]


def _text(events: Events, trained: StepColumns, event: kinds.Event, generation: int) -> str:
    """Empty for what is not shown."""
    if isinstance(event, kinds.GenerationStarted):
        nodes = count(len(event.nodes), "node", "nodes")
        return f"generation {generation} ({short(event.cause)}): {count(event.world_size, 'worker', 'workers')} on {nodes}"
    if isinstance(event, kinds.FirstStep):
        return recovery_line(events, trained, generation) or ""
    if isinstance(event, kinds.CheckpointCommitted):
        return f"checkpoint of step {event.step} committed"
    return text_of(event)


def fitted(view: View, console: Console, problem: Sequence[Text] = ()) -> RenderableType:
    """As much as the terminal has lines for, without its last one, where the cursor stands."""
    shown: RenderableType = ""
    for room in _ROOMS:
        shown = Group(drawn(view, replace(room, columns=console.width)), *problem)
        if len(console.render_lines(shown, pad=False)) < console.size.height:
            break
    return shown


def drawn(view: View, room: Room | None = None) -> RenderableType:
    """room: by default all of it."""
    room = room or Room()
    progress = [] if view.status.plain else [_progress(view, room)]
    parts: list[RenderableType] = [_title(view), *progress, _facts(view, room)]
    if view.status.workers and room.workers:
        parts.append(_workers(view.status, room))
    if view.lately:
        parts.append(_events(view, room))
    return Group(*parts)


def _title(view: View) -> Text:
    return Text.assemble((short(view.name), "bold"), "  ", (view.status.state, _STYLES[view.status.state]))


# What time went to, where the name alone says too little.
_LOST = {END: "since the last step", DOWN: "without a group"}
# Foreign texts are shown as `Text`, without markup.
_STYLES = {
    "running": "green",
    "finished": "bold green",
    "failed": "bold red",
    "drained": "yellow",
    "interrupted": "yellow",
}


def _progress(view: View, room: Room) -> RenderableType:
    step, steps = view.status.step, view.status.steps
    row = Table.grid(padding=(0, 1))
    left = "" if view.left_s is None else f"about {duration(view.left_s)} left"
    row.add_row(
        ProgressBar(total=steps or 1, completed=step, width=12 if room.columns < _NARROW_COLUMNS else 40),
        f"step {step} of {steps or '?'}",
        left,
    )
    return row


def _facts(view: View, room: Room) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    found, spent = view.status, view.spent
    saved = found.last_checkpoint
    rows = {
        "loss": loss_words(view.loss),
        "step time": "-" if view.step_s is None else f"{view.step_s:.3g} s",
        "generation": f"{found.generation}, {count(found.world_size, 'worker', 'workers')}"
        if found.workers
        else f"{found.generation}, no workers",
        "last checkpoint": f"step {saved.step}, {duration(saved.age_s)} ago" if saved else "none",
        "goodput": "-" if spent is None or spent.goodput is None else f"{spent.goodput:.1%}",
    }
    if room.details and spent is not None and spent.badput_s:
        lost = sorted(spent.badput_s.items(), key=lambda part: -part[1])
        rows["lost to"] = ", ".join(
            f"{duration(seconds)} {_LOST.get(kind, short(kind))}" for kind, seconds in lost
        )
    if room.details and view.slow:
        rows["slow"] = ", ".join(
            f"rank {each.rank} on {short(each.node)} (the others wait for it {each.share:.0%} of the time)"
            for each in view.slow
        )
    if room.details and view.shards:
        rows["shards"] = shards_text(view.shards)
    if found.plain is not None:
        rows = {"generation": rows["generation"]} | plain_facts(found.plain)
    for label, text in rows.items():
        table.add_row(label, Text(text))
    return table


def _workers(found: Status, room: Room) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("rank", "node", "pid"):
        table.add_column(column)
    for worker in found.workers[: room.workers]:
        table.add_row(str(worker.rank), Text(short(worker.node)), str(worker.pid))
    if (more := len(found.workers) - room.workers) > 0:
        table.add_row("", f"and {more} more", "")
    return table


def _events(view: View, room: Room) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(style="dim")
    if room.columns < _NARROW_COLUMNS:  # what happened says more than where
        table.add_column(style="dim", overflow="ellipsis", no_wrap=True, max_width=room.columns // 5)
    else:
        table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    for at_s, node, text in view.lately[-room.events :]:
        table.add_row(time_of_day(at_s), Text(short(node)), Text(short(text)))
    return table
