"""A run live, in a terminal or in a browser: both read its files, and change nothing anywhere.

What is shown is not newer than the last look of RunSource: seconds old for a run in a folder, more
for a long run and for one at a URL. `watch` ends when the run has finished or failed; a run that
was interrupted may go on.
"""

import ipaddress
import os
import threading
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic.config.options import ListenAddress
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, ElasticError, UsageError
from elastic.observe.run_view import RunView
from elastic.observe.series import MOST_POINTS
from elastic.report.figures import facts, short
from elastic.report.html_page import html_page, json_text, policy
from elastic.report.http_server import Answer, HttpServer
from elastic.report.page import page_of
from elastic.report.tables import facts_table
from elastic.report.views import RunSource
from elastic.system.clock import SystemClock, time_of_day
from elastic.system.untrusted import printable

_NICENESS = 10
_REDRAWN_S = 1.0
_MOST_EVENTS = 8
_OVER = ("finished", "failed")


def watch(url: str, *, once: bool) -> int:
    """Show the run until it is over, or one time. Raises UsageError, StoreFailed."""
    run, console, clock = RunDir.parse(url), Console(highlight=False), SystemClock()
    if not once and not console.is_terminal:
        raise UsageError("expected a terminal to watch in, found none; --once prints the view one time")
    source = RunSource(run, clock)
    view, problem = source.view(), ""  # a run that is not there is said before the screen changes
    if once:
        console.print(drawn(run.url, view))
        return EXIT_COMPLETE
    os.nice(_NICENESS)
    with (
        suppress(KeyboardInterrupt),  # the way to leave
        Live(drawn(run.url, view), console=console, auto_refresh=False) as live,
    ):
        while view.state not in _OVER:
            clock.sleep(_REDRAWN_S)
            try:
                view, problem = source.view(), ""
            except ElasticError as error:
                problem = str(error)
            live.update(drawn(run.url, view, problem), refresh=True)
    return EXIT_COMPLETE


def drawn(name: str, view: RunView, problem: str = "") -> RenderableType:
    """What is new stands above: a terminal with few lines shows the beginning."""
    title = Text(f"{short(name)}  {view.state}", style="bold")
    told = f"cannot be read now, and is tried again: {short(problem)}\n" if problem else ""
    shown = {label: short(text) for label, text in facts(view).items()}
    return Group(title, Text(told, end=""), _events(view), facts_table(shown))


def _events(view: RunView) -> Table:
    """The newest first."""
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(style="dim")
    table.add_column(style="dim", overflow="ellipsis", no_wrap=True, max_width=24)
    table.add_column(overflow="fold")
    for each in view.incidents[: -_MOST_EVENTS - 1 : -1]:
        table.add_row(time_of_day(each.time), Text(short(each.node)), Text(short(each.text)))
    return table


def serve(name: str, address: ListenAddress) -> int:
    """Answer until Ctrl-C. Raises UsageError where there is no run that can be read, or the port
    is not free.
    """
    run = RunDir.parse(name)
    os.nice(_NICENESS)
    source = RunSource(run, SystemClock(), MOST_POINTS)
    source.view()  # a mistake in the name of the run is told here, and not in the browser
    own = f"{policy(polls=True)}; frame-ancestors 'none'"

    def page(_accept: str) -> Answer:
        body = html_page(page_of(run.url, source.view()), polls=True).encode()
        return Answer(content_type="text/html; charset=utf-8", body=body, policy=own)

    def document(_accept: str) -> Answer:
        body = json_text(page_of(run.url, source.view())).encode()
        return Answer(content_type="application/json", body=body)

    server = HttpServer(address, {"/": page, "/picture.json": document}, name=address.host)
    shown = ListenAddress(host=address.host, port=server.address.port)
    is_own = ipaddress.ip_address(server.address.host).is_loopback
    who = "" if is_own else "; who reaches this address can read it"
    print(f"{printable(run.url)} is at http://{shown}/; Ctrl-C ends this{who}", flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    return EXIT_COMPLETE
