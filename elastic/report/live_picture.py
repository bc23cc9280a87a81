"""The newest picture of a run, drawn again only so often that the machine does not notice.

It does not promise to be newer than the time between two drawings: seconds for a run in a folder,
longer for a long run, and for one at a URL, which is read whole each time.
"""

import hashlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from elastic.errors import ElasticError
from elastic.report.picture.page import document, page
from elastic.report.picture.picture import Picture
from elastic.report.polling import pause_s
from elastic.system.clock import Clock

_PAUSE_S = 2.0
_REMOTE_PAUSE_S = 20.0


class NotNow(ElasticError):  # noqa: N818
    """There is no picture at this moment; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """tag: names this document; equal documents have the same one."""

    tag: str
    document: bytes
    picture: Picture

    @property
    def page(self) -> bytes:
        return page(self.picture, polls=True).encode()


class LivePicture:
    """For any number of threads: one of them draws, and the others get what was drawn last."""

    def __init__(
        self, draw: Callable[[], Picture], clock: Clock, *, is_remote: bool, place: Callable[[], object]
    ) -> None:
        """draw: reads the run. Raises OSError, or an ElasticError. place: what it reads; where that
        is another place than the last time, it is drawn at once.
        """
        self._draw, self._clock, self._place = draw, clock, place
        self._drawn_place: object = None
        least_s = _REMOTE_PAUSE_S if is_remote else _PAUSE_S
        self._pause_s = partial(pause_s, least_s=least_s, is_remote=is_remote)
        self._drawing = threading.Lock()
        self._drawn: Drawn | None = None
        self._failure: str | None = None
        self._again_at = -math.inf

    def newest(self) -> Drawn:
        """Raises NotNow where the run can no longer be read; the first time, what `draw` raises."""
        if self._is_due() and self._drawing.acquire(blocking=self._drawn is None):
            try:
                self._draw_again()
            finally:
                self._drawing.release()
        if self._failure is not None:
            raise NotNow(self._failure)
        assert self._drawn is not None
        return self._drawn

    def _is_due(self) -> bool:
        return self._clock.monotonic() >= self._again_at or self._place() != self._drawn_place

    def _draw_again(self) -> None:
        if not self._is_due():  # another thread has drawn meanwhile
            return
        begin, self._drawn_place = self._clock.monotonic(), self._place()
        try:
            self._keep(self._draw())
            self._failure = None
        # The edge of a thread: without it the old picture would be shown for ever, as if it were
        # the newest.
        except Exception as error:
            if self._drawn is None:
                raise
            is_sentence = isinstance(error, ElasticError)
            self._failure = (
                str(error) if is_sentence else f"expected files of a run that can be read, found: {error}"
            )
        finally:
            cost_s = self._clock.monotonic() - begin
            self._again_at = begin + cost_s + self._pause_s(cost_s)

    def _keep(self, shown: Picture) -> None:
        text = document(shown).encode()
        tag = f'"{hashlib.sha256(text).hexdigest()[:32]}"'
        if self._drawn is None or self._drawn.tag != tag:
            self._drawn = Drawn(tag=tag, document=text, picture=shown)
