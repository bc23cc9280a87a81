"""The page of a run, live in a browser: it reads the run's files, and changes nothing anywhere.

Training does not notice: another process reads the files, at a low priority, and for a small share
of the time. The page is not newer than the time between two looks: seconds for a run in a folder,
longer for a long run, and for one at a URL.
"""

import hashlib
import ipaddress
import math
import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from elastic.config.listen_address import ListenAddress
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, ElasticError
from elastic.observe.reader import RunReader
from elastic.observe.run_view import RunView
from elastic.observe.series import MOST_POINTS
from elastic.report.download import readable, unreadable
from elastic.report.html_page import html_page, json_text, policy
from elastic.report.http_server import Answer, HttpServer, listen
from elastic.report.page import page_of
from elastic.report.prometheus import RunSeries
from elastic.report.views import folder_id, pause_s, view_now
from elastic.storage.remote import check_url
from elastic.system import interrupt
from elastic.system.clock import Clock, SystemClock
from elastic.system.untrusted import printable

PAUSE_S, REMOTE_PAUSE_S = 2.0, 20.0
_NICENESS = 10


def serve(name: str, address: ListenAddress) -> int:
    """Answer until Ctrl-C. Raises UsageError where there is no run that can be read, or the port
    is not free.
    """
    run, clock = RunDir.parse(name), SystemClock()
    check_url(run.url)
    with closing(RunReader(run, points=MOST_POINTS)) as reader:
        live = LiveRun(
            partial(_look, run, reader),
            clock,
            least_s=REMOTE_PAUSE_S if run.is_remote else PAUSE_S,
            is_remote=run.is_remote,
            place=partial(folder_id, run.local),
        )
        series = RunSeries({"run": run.url}, {})
        pages = {
            "/": partial(_answer, live, _page),
            "/picture.json": partial(_answer, live, _document),
            "/metrics": partial(_answer, live, partial(_metrics, series)),
        }
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A run as it was read. tag: names the document, which is the JSON of `shown`."""

    view: RunView
    shown: dict[str, Any]
    document: bytes
    tag: str


def seen(name: str, view: RunView) -> Seen:
    shown = page_of(name, view)
    document = json_text(shown).encode()
    tag = f'"{hashlib.sha256(document).hexdigest()[:32]}"'
    return Seen(view=view, shown=shown, document=document, tag=tag)


def _look(run: RunDir, reader: RunReader) -> Seen:
    """Raises OSError, UsageError, StoreFailed."""
    with readable(run) as there:
        return seen(run.url, view_now(there, None if run.is_remote else reader))  # a copy is read whole


def _answer(live: "LiveRun", render: Callable[[Seen, str], Answer], accept: str) -> Answer:
    try:
        return render(live.newest(), accept)
    except NotNow as error:
        return Answer(status=HTTPStatus.SERVICE_UNAVAILABLE, body=f"{error}\n".encode(errors="replace"))


def _page(found: Seen, _accept: str) -> Answer:
    own = f"{policy(polls=True)}; frame-ancestors 'none'"
    return Answer(
        content_type="text/html; charset=utf-8", body=html_page(found.shown, polls=True).encode(), policy=own
    )


def _document(found: Seen, _accept: str) -> Answer:
    return Answer(content_type="application/json", body=found.document, tag=found.tag)


def _metrics(series: RunSeries, found: Seen, accept: str) -> Answer:
    body, content_type = series.text(found.view, accept)
    return Answer(body=body, content_type=content_type)


class NotNow(ElasticError):  # noqa: N818
    """The run cannot be read at this moment; the message says why."""


class LiveRun:
    """A run that is read only so often that the machine does not notice.

    For any number of threads: one of them reads, and the others get what was read last.
    """

    def __init__(
        self,
        look: Callable[[], Seen],
        clock: Clock,
        *,
        least_s: float,
        is_remote: bool,
        place: Callable[[], object],
    ) -> None:
        """look: reads the run. Raises OSError, or an ElasticError. least_s: between two looks.
        place: what is read; where it is another place than the last time, it is read at once.
        """
        self._look, self._clock, self._place = look, clock, place
        self._pause_s = partial(pause_s, least_s=least_s, is_remote=is_remote)
        self._looking = threading.Lock()
        self._seen_place: object = None
        self._seen: Seen | None = None
        self._failure: str | None = None
        self._again_at = -math.inf

    def newest(self) -> Seen:
        """Raises NotNow where the run can no longer be read; the first time, what `look` raises."""
        if self._is_due() and self._looking.acquire(blocking=self._seen is None):
            try:
                if self._is_due():  # no other thread has looked meanwhile
                    self._look_again()
            finally:
                self._looking.release()
        if self._failure is not None:
            raise NotNow(self._failure)
        assert self._seen is not None
        return self._seen

    def _is_due(self) -> bool:
        return self._clock.monotonic() >= self._again_at or self._place() != self._seen_place

    def _look_again(self) -> None:
        begin, self._seen_place = self._clock.monotonic(), self._place()
        try:
            self._seen, self._failure = self._look(), None
        # The edge of a thread: without it the old view would be shown for ever, as if it were the
        # newest.
        except Exception as error:
            if self._seen is None:
                raise
            is_sentence = isinstance(error, ElasticError)
            self._failure = (
                str(error) if is_sentence else f"expected files of a run that can be read, found: {error}"
            )
        finally:
            cost_s = self._clock.monotonic() - begin
            self._again_at = begin + cost_s + self._pause_s(cost_s)
