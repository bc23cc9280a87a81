"""A metadata service answers a request within a bounded time, or the caller learns why it did not.

Each cloud has one at an address that only its machines reach. It is asked directly: a proxy of the
environment would ask the service of its own machine. Nothing is tried twice here, and no redirect
is followed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError

CONNECT_S = 1.0
ANSWER_S = 5.0
ANSWER_LIMIT_BYTES = 1024 * 1024


class NoAnswer(Exception):  # noqa: N818 - it says what is wrong
    """No usable answer came, and the text says why: the caller asks again later."""


class Silence(NoAnswer):
    """There was a connection, and nothing came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """headers: by names in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace").strip()

    def expect_ok(self) -> None:
        """Raises NoAnswer."""
        if self.status != HTTPStatus.OK:
            raise NoAnswer(f"HTTP {self.status}")


class MetadataService:
    def __init__(self, url: str) -> None:
        """url: `http://HOST[:PORT]`."""
        self.url = url
        self._pool = urllib3.PoolManager(maxsize=1, retries=False)

    def ask(
        self, path: str, headers: Mapping[str, str], *, method: str = "GET", answer_s: float = ANSWER_S
    ) -> Answer:
        """answer_s: the longest silence of the service. Raises NoAnswer."""
        try:
            response = self._pool.request(
                method,
                f"{self.url}{path}",
                headers=dict(headers),
                timeout=urllib3.Timeout(connect=CONNECT_S, read=answer_s),
                redirect=False,
                preload_content=False,
            )
            try:
                body = response.read(ANSWER_LIMIT_BYTES + 1)
            finally:
                response.close()
        except ReadTimeoutError as error:
            raise Silence(f"no answer within {answer_s:g} s") from error
        except (HTTPError, OSError, ValueError) as error:
            raise NoAnswer(_reason(error)) from error
        if len(body) > ANSWER_LIMIT_BYTES:
            raise NoAnswer(f"an answer of more than {ANSWER_LIMIT_BYTES} bytes")
        found = {name.lower(): value for name, value in response.headers.items()}
        return Answer(status=response.status, body=body, headers=found)


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectTimeoutError):
        return f"no connection within {CONNECT_S:g} s"
    if isinstance(error, NewConnectionError):
        return f"no connection: {error.__cause__ or error}"
    return f"no whole answer: {error}"
