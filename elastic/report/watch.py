"""A run live in a terminal: where it stands, what it does, and what happened lately.

It reads the run's files again and again, less often where that takes longer, and changes nothing.
It ends when the run has finished or failed; a run that was interrupted may go on.
"""

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, ElasticError, UsageError
from elastic.observe.generations import DOWN
from elastic.observe.goodput import END
from elastic.observe.reader import RunReader, read_run
from elastic.observe.run_view import RunView, view_of
from elastic.observe.step_line import loss_words
from elastic.report.download import readable
from elastic.report.facts import compared, plain_facts, shards_text
from elastic.report.views import folder_id, heartbeat_ages_s, pause_s
from elastic.report.words import count, duration, short
from elastic.storage.remote import check_url
from elastic.system.clock import SystemClock, time_of_day

PAUSE_S, REMOTE_PAUSE_S = 1.0, 5.0
_NICENESS = 10
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


def watch(url: str, *, once: bool) -> int:
    """Show the run until it is over, or one time. Raises UsageError, StoreFailed."""
    run, console = RunDir.parse(url), Console(highlight=False)
    check_url(run.url)
    if not once and not console.is_terminal:
        raise UsageError("expected a terminal to watch in, found none; --once prints the view one time")
    with closing(RunReader(run)) as reader:
        if once:
            console.print(drawn(run.url, _first_look(run, reader)))
        else:
            _show(run, reader, console)
    return EXIT_COMPLETE


def _show(run: RunDir, reader: RunReader, console: Console) -> None:
    clock = SystemClock()
    os.nice(_NICENESS)
    view = _first_look(run, reader)  # a run that is not there is said before the screen changes
    # Ctrl-C is the way to leave.
    with (
        suppress(KeyboardInterrupt),
        Live(fitted(run.url, view, console), console=console, auto_refresh=False) as live,
    ):
        while view.state not in _OVER:
            began_s = clock.monotonic()
            problem: list[Text] = []
            try:
                view = _look(run, reader)
            except (OSError, ElasticError) as error:
                problem = [Text(f"cannot be read now, and is tried again: {short(str(error))}")]
            live.update(fitted(run.url, view, console, problem), refresh=True)
            taken_s = clock.monotonic() - began_s
            least_s = REMOTE_PAUSE_S if run.is_remote else PAUSE_S
            until_s = clock.monotonic() + pause_s(taken_s, least_s=least_s, is_remote=run.is_remote)
            place = folder_id(run.local)
            while (left_s := until_s - clock.monotonic()) > 0 and folder_id(run.local) == place:
                clock.sleep(min(left_s, PAUSE_S))


def _first_look(run: RunDir, reader: RunReader) -> RunView:
    """Raises UsageError, StoreFailed."""
    try:
        return _look(run, reader)
    except OSError as error:
        raise UsageError(f"expected files of a run that can be read, found: {error}; try again") from error


def _look(run: RunDir, reader: RunReader) -> RunView:
    """Raises OSError, UsageError, StoreFailed."""
    ages_s = heartbeat_ages_s(run.rendezvous_url)
    with readable(run) as there:
        # A copy is read whole.
        return view_of(read_run(there) if run.is_remote else reader.read(), ages_s)


def _left_s(view: RunView) -> float | None:
    """Seconds until the last step, at the pace of the newest ones; None while nobody trains."""
    if view.recent_step_s is None or view.length is None or not view.world_size:
        return None
    return (view.length - view.step) * view.recent_step_s


def fitted(name: str, view: RunView, console: Console, problem: Sequence[Text] = ()) -> RenderableType:
    """As much as the terminal has lines for, without its last one, where the cursor stands."""
    shown: RenderableType = ""
    for room in _ROOMS:
        shown = Group(drawn(name, view, replace(room, columns=console.width)), *problem)
        if len(console.render_lines(shown, pad=False)) < console.size.height:
            break
    return shown


def drawn(name: str, view: RunView, room: Room | None = None) -> RenderableType:
    """room: by default all of it."""
    room = room or Room()
    progress = [] if view.plain else [_progress(view, room)]
    parts: list[RenderableType] = [_title(name, view), *progress, _facts(view, room)]
    if view.workers and room.workers:
        parts.append(_workers(view, room))
    if view.lately:
        parts.append(_events(view, room))
    return Group(*parts)


def _title(name: str, view: RunView) -> Text:
    return Text.assemble((short(name), "bold"), "  ", (view.state, _STYLES[view.state]))


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


def _progress(view: RunView, room: Room) -> RenderableType:
    steps = view.length
    row = Table.grid(padding=(0, 1))
    left_s = _left_s(view)
    left = "" if left_s is None else f"about {duration(left_s)} left"
    row.add_row(
        ProgressBar(
            total=steps or 1, completed=view.step, width=12 if room.columns < _NARROW_COLUMNS else 40
        ),
        f"step {view.step} of {steps or '?'}",
        left,
    )
    return row


def _facts(view: RunView, room: Room) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    spent, saved = view.time, view.checkpoints.newest
    workers = count(view.world_size, "worker", "workers") if view.workers else "no workers"
    rows = {
        "loss": loss_words(view.newest.loss if view.newest else None),
        "step time": "-" if view.recent_step_s is None else f"{view.recent_step_s:.3g} s",
        "generation": f"{view.generation}, {workers}",
        "last checkpoint": f"step {saved.step}, {duration(max(0.0, view.now_s - saved.time))} ago"
        if saved
        else "none",
        "goodput": "-" if spent is None or spent.goodput is None else f"{spent.goodput:.1%}",
    }
    if room.details and spent is not None and spent.badput_s:
        lost = sorted(spent.badput_s.items(), key=lambda part: -part[1])
        rows["lost to"] = ", ".join(
            f"{duration(seconds)} {_LOST.get(kind, short(kind))}" for kind, seconds in lost
        )
    if room.details and view.slow_ranks:
        rows["slow"] = ", ".join(
            f"rank {each.rank} on {short(each.node)} (the others wait for it {each.share:.0%} of the time)"
            for each in view.slow_ranks
        )
    if room.details and view.shards_by_rank:
        rows["shards"] = shards_text(view.shards_by_rank)
    if room.details and (view.rehearsals.count or view.overlaps.count):
        rows["done twice"] = f"{compared(view.rehearsals)} (rehearsals); {compared(view.overlaps)} (overlaps)"
    if view.plain is not None:
        rows = {"generation": rows["generation"]} | plain_facts(view.plain)
    for label, text in rows.items():
        table.add_row(label, Text(text))
    return table


def _workers(view: RunView, room: Room) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("rank", "node", "pid"):
        table.add_column(column)
    for worker in view.workers[: room.workers]:
        table.add_row(str(worker.rank), Text(short(worker.node)), str(worker.pid))
    if (more := len(view.workers) - room.workers) > 0:
        table.add_row("", f"and {more} more", "")
    return table


def _events(view: RunView, room: Room) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(style="dim")
    if room.columns < _NARROW_COLUMNS:  # what happened says more than where
        table.add_column(style="dim", overflow="ellipsis", no_wrap=True, max_width=room.columns // 5)
    else:
        table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    for each in view.lately[-room.events :]:
        table.add_row(time_of_day(each.time), Text(short(each.node)), Text(short(each.text)))
    return table
