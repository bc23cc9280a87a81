"""An eviction of an Azure VM is known thirty seconds ahead: an event of type Preempt is scheduled.

`scheduledevents` lists the events of all VMs of a group: only those that name this VM count. Of
them Preempt and Terminate take it away; Freeze, Reboot and Redeploy do not. Each event is judged by
itself: one that is not as documented, perhaps of another VM, hides no other. No event is
acknowledged: that would let the VM be taken before its last step is saved (docs/decisions/0023).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from elastic.agent.clouds.metadata import ANSWER_S, Answer, MetadataService, NoAnswer
from elastic.system.untrusted import decode, fits, parse_json, pattern

ADDRESS = "http://169.254.169.254"
# The first request of a VM switches its events on, which takes up to two minutes.
FIRST_ANSWER_S = 130.0
_HEADERS = {"Metadata": "true"}
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_TAKES_AWAY = ("Preempt", "Terminate")
_NAME_LIMIT = 200
_SHORT_TEXT = Annotated[str, pattern("[ -~]{1,200}", "a short text")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """What decides. NotBefore is only shown."""

    EventType: str
    Resources: tuple[str, ...]


class Azure:
    name = "Azure"

    def __init__(self, service: MetadataService, report: Callable[[str], None]) -> None:
        """report: is told once of events that cannot be read."""
        self.url = service.url
        self._service = service
        self._report = report
        self._has_reported = False
        self._machine: str | None = None
        self._has_events = False

    def ask(self) -> str | None:
        """What takes this VM away, if an event says so. Raises NoAnswer."""
        if self._machine is None:
            self._machine = self._own_name()
        answer = self._get(_EVENTS, ANSWER_S if self._has_events else FIRST_ANSWER_S)
        events = _events(answer.body)
        self._has_events = True
        reasons = [self._reason(event, self._machine) for event in events]
        return next(filter(None, reasons), None)

    def _reason(self, event: Any, machine: str) -> str | None:
        """Why this event takes the VM away, None where it does not."""
        try:
            read = decode(ScheduledEvent, event, what="an event of scheduledevents", exact=False)
        except ValueError as error:
            if not self._has_reported:
                self._has_reported = True
                self._report(
                    f"{error}; events of {self.name} that cannot be read are left out, the others count"
                )
            return None
        if read.EventType not in _TAKES_AWAY or machine not in map(str.casefold, read.Resources):
            return None
        when = event.get("NotBefore")  # empty where it has begun
        return read.EventType + (f", not before {when}" if fits(when, _SHORT_TEXT) else "")

    def _own_name(self) -> str:
        name = self._get(_NAME, ANSWER_S).text
        if not name or len(name) > _NAME_LIMIT or not name.isprintable():
            raise NoAnswer("an answer that is no name of a VM")
        return name.casefold()  # names of Azure are alike in both cases

    def _get(self, path: str, answer_s: float) -> Answer:
        answer = self._service.ask(path, _HEADERS, answer_s=answer_s)
        answer.expect_ok()
        return answer


def _events(body: bytes) -> list[Any]:
    """Raises NoAnswer."""
    try:
        answer = parse_json(body)
    except ValueError as error:
        raise NoAnswer(f"an answer that is no JSON: {error}") from error
    events = answer.get("Events") if isinstance(answer, dict) else None
    if not isinstance(events, list):
        raise NoAnswer("expected a list of Events in scheduledevents, found none")
    return events
