"""A run live in a terminal: where it stands, what it does, and what happened lately.

It reads the run's files again and again, less often where that takes longer, and changes nothing.
It ends when the run has finished or failed; a run that was interrupted may go on.
"""

import os
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, UsageError
from elastic.observe.run_view import RunView
from elastic.report.figures import duration, facts, short
from elastic.report.tables import facts_table
from elastic.report.views import looks
from elastic.storage.remote import check_url
from elastic.system.clock import SystemClock, time_of_day

_NICENESS = 10
_BAR_COLUMNS = 30
_MOST_EVENTS = 8
_OVER = ("finished", "failed")
_STYLES = {
    "running": "green",
    "finished": "bold green",
    "failed": "bold red",
    "drained": "yellow",
    "interrupted": "yellow",
}


def watch(url: str, *, once: bool) -> int:
    """Show the run until it is over, or one time. Raises UsageError, StoreFailed."""
    run, console = RunDir.parse(url), Console(highlight=False)
    check_url(run.url)
    if not once and not console.is_terminal:
        raise UsageError("expected a terminal to watch in, found none; --once prints the view one time")
    seen = looks(run, SystemClock())
    view, _ = next(seen)  # a run that is not there is said before the screen changes
    if once:
        console.print(drawn(run.url, view))
        return EXIT_COMPLETE
    os.nice(_NICENESS)
    with (
        suppress(KeyboardInterrupt),  # the way to leave
        Live(drawn(run.url, view), console=console, auto_refresh=False) as live,
    ):
        while view.state not in _OVER:
            view, problem = next(seen)
            live.update(drawn(run.url, view, problem), refresh=True)
    return EXIT_COMPLETE


def drawn(name: str, view: RunView, problem: str = "") -> RenderableType:
    """What is new stands above: a terminal with few lines shows the beginning."""
    parts: list[RenderableType] = [
        Text.assemble((short(name), "bold"), "  ", (view.state, _STYLES[view.state]))
    ]
    if problem:
        parts.append(Text(f"cannot be read now, and is tried again: {short(problem)}"))
    if view.plain is None:
        parts.append(_progress(view))
    shown = {label: short(text) for label, text in facts(view, "watch").items()}
    return Group(*parts, _events(view), facts_table(shown))


def _progress(view: RunView) -> RenderableType:
    bar = ProgressBar(total=view.length or 1, completed=view.step, width=_BAR_COLUMNS)
    row, left_s = Table.grid(padding=(0, 1)), _left_s(view)
    row.add_row(bar, "" if left_s is None else f"about {duration(left_s)} left")
    return row


def _left_s(view: RunView) -> float | None:
    """Seconds until the last step, at the pace of the newest ones; None while nobody trains."""
    if view.recent_step_s is None or view.length is None or not view.world_size:
        return None
    return (view.length - view.step) * view.recent_step_s


def _events(view: RunView) -> Table:
    """The newest first."""
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(style="dim")
    table.add_column(style="dim", overflow="ellipsis", no_wrap=True, max_width=24)
    table.add_column(overflow="fold")
    for each in view.incidents[: -_MOST_EVENTS - 1 : -1]:
        table.add_row(time_of_day(each.time), Text(short(each.node)), Text(short(each.text)))
    return table
