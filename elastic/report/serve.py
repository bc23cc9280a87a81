"""The page of a run, live in a browser: it reads the run's files, and changes nothing anywhere.

Training does not notice: another process reads the files, at a low priority, and for a small share
of the time. The page is not newer than the time between two looks: seconds for a run in a folder,
longer for a long run, and for one at a URL.
"""

import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from elastic.config.options import ListenAddress
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, StoreFailed
from elastic.observe.run_view import RunView
from elastic.observe.series import MOST_POINTS
from elastic.report.html_page import html_page, json_text, policy
from elastic.report.http_server import Answer, HttpServer, Page, listen
from elastic.report.page import page_of
from elastic.report.views import looks
from elastic.storage.remote import check_url
from elastic.system import interrupt
from elastic.system.clock import SystemClock
from elastic.system.untrusted import printable

_NICENESS = 10


def serve(name: str, address: ListenAddress) -> int:
    """Answer until Ctrl-C. Raises UsageError where there is no run that can be read, or the port
    is not free.
    """
    run, clock = RunDir.parse(name), SystemClock()
    check_url(run.url)
    interrupt.raise_from_here()
    os.nice(_NICENESS)
    # A mistake in the name of the run is told here, and not in the browser.
    live = LiveRun(run.url, looks(run, clock, MOST_POINTS))
    server = HttpServer(listen(address), _pages(live), name=address.host)
    threading.Thread(target=live.follow, name="reader", daemon=True).start()
    try:
        return _serve(run, address.host, server)
    finally:
        server.stop()


def _pages(live: "LiveRun") -> dict[str, Page]:
    own = f"{policy(polls=True)}; frame-ancestors 'none'"

    def page(_accept: str) -> Answer:
        body = html_page(live.newest(), polls=True).encode()
        return Answer(content_type="text/html; charset=utf-8", body=body, policy=own)

    def document(_accept: str) -> Answer:
        return Answer(content_type="application/json", body=json_text(live.newest()).encode())

    return {"/": page, "/picture.json": document}


def _serve(run: RunDir, host: str, server: HttpServer) -> int:
    is_own = ipaddress.ip_address(server.address.host).is_loopback
    shown = socket.gethostname() if host in {"0.0.0.0", "::"} else host  # noqa: S104 - to name it
    print(
        f"{printable(run.url)} is at http://{ListenAddress(host=shown, port=server.address.port)}/; Ctrl-C ends this"
        + ("" if is_own else "; who reaches this address can read it"),
        flush=True,
    )
    with suppress(KeyboardInterrupt):
        server.serve()
    return EXIT_COMPLETE


class LiveRun:
    """What was seen last of a run: one thread follows it, and any number ask."""

    def __init__(self, name: str, looks: Iterator[tuple[RunView, str]]) -> None:
        """Looks once, and raises what that raises."""
        self._name, self._looks = name, looks
        self.see(*next(looks))

    def see(self, view: RunView, problem: str) -> None:
        self._shown, self._problem = page_of(self._name, view), problem

    def follow(self) -> None:
        for view, problem in self._looks:
            try:
                self.see(view, problem)
            except Exception as error:  # else the old page would be shown for ever
                self._problem = str(error)

    def newest(self) -> dict[str, Any]:
        """As page.py shows it. Raises StoreFailed where the run can no longer be read."""
        if self._problem:
            raise StoreFailed(self._problem)
        return self._shown
