"""The page of a run, live in a browser: it reads the run's files, and changes nothing anywhere.

Training does not notice: another process reads the files, at a low priority, and for a small share
of the time. The page is not newer than the time between two looks: seconds for a run in a folder,
longer for a long run, and for one at a URL.
"""

import ipaddress
import math
import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from elastic.config.listen_address import ListenAddress
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, ElasticError, StoreFailed
from elastic.observe.reader import RunReader
from elastic.observe.run_view import RunView
from elastic.observe.series import MOST_POINTS
from elastic.report.download import unreadable
from elastic.report.html_page import html_page, json_text, policy
from elastic.report.http_server import Answer, HttpServer, listen
from elastic.report.page import page_of
from elastic.report.prometheus import RunSeries
from elastic.report.views import look_again, pause_s
from elastic.storage.remote import check_url
from elastic.system import interrupt
from elastic.system.clock import Clock, SystemClock
from elastic.system.untrusted import printable

PAUSE_S, REMOTE_PAUSE_S = 2.0, 20.0
_NICENESS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A run as it was read, and its page, with the document in it."""

    view: RunView
    shown: dict[str, Any]
    document: bytes


def seen(name: str, view: RunView) -> Seen:
    shown = page_of(name, view)
    return Seen(view=view, shown=shown, document=json_text(shown).encode())


def serve(name: str, address: ListenAddress) -> int:
    """Answer until Ctrl-C. Raises UsageError where there is no run that can be read, or the port
    is not free.
    """
    run, clock = RunDir.parse(name), SystemClock()
    check_url(run.url)
    series, own = RunSeries({"run": run.url}, {}), f"{policy(polls=True)}; frame-ancestors 'none'"
    with closing(RunReader(run, points=MOST_POINTS)) as reader:
        live = LiveRun(
            lambda: seen(run.url, look_again(run, reader)),
            clock,
            least_s=REMOTE_PAUSE_S if run.is_remote else PAUSE_S,
            is_remote=run.is_remote,
        )

        def page(_accept: str) -> Answer:
            body = html_page(live.newest().shown, polls=True).encode()
            return Answer(content_type="text/html; charset=utf-8", body=body, policy=own)

        def document(_accept: str) -> Answer:
            return Answer(content_type="application/json", body=live.newest().document)

        def metrics(accept: str) -> Answer:
            body, content_type = series.text(live.newest().view, accept)
            return Answer(body=body, content_type=content_type)

        pages = {"/": page, "/picture.json": document, "/metrics": metrics}
        server = HttpServer(listen(address), pages, clock, name=address.host)
        try:
            return _serve(run, address.host, server, live)
        finally:
            server.stop()


def _serve(run: RunDir, host: str, server: HttpServer, live: "LiveRun") -> int:
    interrupt.raise_from_here()
    os.nice(_NICENESS)
    # A mistake in the name of the run is told here, and not in the browser.
    try:
        live.newest()
    except OSError as error:
        raise unreadable(error) from error
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
    """A run that is read only so often that the machine does not notice.

    For any number of threads: one of them reads, and the others get what was read last.
    """

    def __init__(self, look: Callable[[], Seen], clock: Clock, *, least_s: float, is_remote: bool) -> None:
        """look: reads the run. Raises OSError, or an ElasticError. least_s: between two looks."""
        self._look, self._clock = look, clock
        self._least_s, self._is_remote = least_s, is_remote
        self._looking = threading.Lock()
        self._seen: Seen | None = None
        self._failure = ""
        self._again_at = -math.inf

    def newest(self) -> Seen:
        """Raises StoreFailed where the run can no longer be read; the first time, what `look`
        raises.
        """
        if self._clock.monotonic() >= self._again_at and self._looking.acquire(blocking=self._seen is None):
            try:
                if self._clock.monotonic() >= self._again_at:  # no other thread has looked meanwhile
                    self._look_again()
            finally:
                self._looking.release()
        if self._failure:
            raise StoreFailed(self._failure)
        assert self._seen is not None
        return self._seen

    def _look_again(self) -> None:
        began_s = self._clock.monotonic()
        try:
            self._seen, self._failure = self._look(), ""
        # The edge of a thread: without it the old view would be shown for ever, as if it were the
        # newest.
        except Exception as error:
            if self._seen is None:
                raise
            self._failure = str(error if isinstance(error, ElasticError) else unreadable(OSError(str(error))))
        finally:
            now_s = self._clock.monotonic()
            self._again_at = now_s + pause_s(
                now_s - began_s, least_s=self._least_s, is_remote=self._is_remote
            )
