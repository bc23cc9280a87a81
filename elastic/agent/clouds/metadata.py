"""A request to a metadata service is answered in time, or the caller learns why it is not.

Each cloud has such a service at an address that only its machines reach. It is asked directly: a
proxy of the environment would ask the service of its own machine. Nothing is tried twice here, and
no redirect is followed. The limit is on each wait for bytes: a service that sends one now and then
is waited for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPMessage
from typing import Any
from urllib.parse import urlsplit

from elastic.system.untrusted import parse_json

CONNECT_S = 1.0
ANSWER_S = 5.0
ANSWER_LIMIT_BYTES = 1024 * 1024


class NoAnswer(Exception):  # noqa: N818 - it says what is wrong
    """No usable answer came, and the text says why: the caller asks again later."""


class Silence(NoAnswer):
    """There was a connection, and nothing came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """headers: their names are read in either case."""

    status: int
    body: bytes
    headers: HTTPMessage

    def text(self) -> str:
        """Raises NoAnswer, as `json_fields` does."""
        if self.status != HTTPStatus.OK:
            raise NoAnswer(f"HTTP {self.status}")
        return self.body.decode(errors="replace").strip()

    def json_fields(self) -> dict[str, Any]:
        try:
            found = parse_json(self.text())
        except ValueError as error:
            raise NoAnswer(f"an answer that is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise NoAnswer("an answer that is no JSON object")
        return found


def request(
    url: str, path: str, headers: Mapping[str, str], *, method: str = "GET", answer_s: float | None = None
) -> Answer:
    """url: `http://HOST[:PORT]`. answer_s: ANSWER_S where it is None. Raises NoAnswer."""
    answer_s = ANSWER_S if answer_s is None else answer_s
    where = urlsplit(url)
    connection = HTTPConnection(where.hostname or "", where.port or 80, timeout=CONNECT_S)
    try:
        connection.connect()
        connection.sock.settimeout(answer_s)
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read(ANSWER_LIMIT_BYTES + 1)
    except TimeoutError as error:
        if connection.sock is None:
            raise NoAnswer(f"no connection within {CONNECT_S:g} s") from error
        raise Silence(f"no answer within {answer_s:g} s") from error
    except (HTTPException, OSError, ValueError) as error:
        what = "no connection" if connection.sock is None else "no whole answer"
        raise NoAnswer(f"{what}: {error}") from error
    finally:
        connection.close()
    if len(body) > ANSWER_LIMIT_BYTES:
        raise NoAnswer(f"an answer of more than {ANSWER_LIMIT_BYTES} bytes")
    return Answer(status=answer.status, body=body, headers=answer.headers)
