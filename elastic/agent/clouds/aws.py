"""An interruption of a spot instance is known two minutes ahead: `spot/instance-action` exists.

It is asked by IMDSv2, with a token, which every instance answers. The recommendation to rebalance
is no notice: it says that an interruption has become likelier, and the instance may live for days
(docs/decisions/0023).
"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

from elastic.agent.clouds.metadata import Answer, MetadataService, NoAnswer, Silence
from elastic.system.clock import Clock
from elastic.system.untrusted import decode, fits, parse_json, parse_number, pattern

ADDRESS = "http://169.254.169.254"
TOKEN_S = 21600  # the longest that the service grants
_TOKEN, _TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
_WORD = pattern("[ -~]{1,200}", "a short text")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceAction:
    """action: `terminate`, `stop` or `hibernate`. The time, by the cloud's clock, is only shown."""

    action: Annotated[str, _WORD]


class Aws:
    name = "AWS"

    def __init__(self, service: MetadataService, clock: Clock) -> None:
        self.url = service.url
        self._service = service
        self._clock = clock
        self._token: str | None = None
        self._renew_s = 0.0

    def ask(self) -> str | None:
        """The action that is to come, whichever it is; None where none is. Raises NoAnswer."""
        answer = self._get("/latest/meta-data/spot/instance-action")
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        answer.expect_ok()
        try:
            action = decode(InstanceAction, answer.body, what="spot/instance-action", exact=False).action
            time = parse_json(answer.body).get("time")
        except ValueError as error:
            raise NoAnswer(str(error)) from error
        return f"{action} at {time if fits(time, Annotated[str, _WORD]) else 'an unknown time'}"

    def _get(self, path: str) -> Answer:
        """A token that the service does not know, as after a sleep of the machine, is replaced
        once.
        """
        answer = self._service.ask(path, {_TOKEN: self._valid_token()})
        if answer.status == HTTPStatus.UNAUTHORIZED:
            self._token = None
            answer = self._service.ask(path, {_TOKEN: self._valid_token()})
        return answer

    def _valid_token(self) -> str:
        """Raises NoAnswer."""
        now = self._clock.monotonic()
        if self._token is None or now >= self._renew_s:
            try:
                answer = self._service.ask("/latest/api/token", {_TTL: str(TOKEN_S)}, method="PUT")
            except Silence as error:  # an answer that may take one hop reaches no container
                raise NoAnswer(f"{error}; for a container the instance needs a hop limit of 2") from error
            if answer.status == HTTPStatus.FORBIDDEN:
                raise NoAnswer("HTTP 403: the instance's metadata service is switched off")
            answer.expect_ok()
            token = answer.text
            if not token or not token.isascii() or not token.isprintable():
                raise NoAnswer("an answer that is no token")
            granted_s = parse_number(answer.headers.get(_TTL.lower(), "")) or TOKEN_S
            self._token, self._renew_s = token, now + granted_s / 2
        return self._token
