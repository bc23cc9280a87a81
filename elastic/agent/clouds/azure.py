"""An eviction of an Azure VM is known thirty seconds ahead: an event of type Preempt is scheduled.

`scheduledevents` lists the events of all VMs of a group: only those that name this VM count. Of
them Preempt and Terminate take it away; Freeze, Reboot and Redeploy do not. No event is
acknowledged: that would let the VM be taken before its last step is saved (docs/decisions/0023).
"""

from dataclasses import dataclass
from typing import Annotated

from elastic.agent.clouds.metadata import ANSWER_S, Answer, MetadataService, NoAnswer
from elastic.system.untrusted import decode, pattern

ADDRESS = "http://169.254.169.254"
# The first request of a VM switches its events on, which takes up to two minutes.
FIRST_ANSWER_S = 130.0
_HEADERS = {"Metadata": "true"}
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_TAKES_AWAY = ("Preempt", "Terminate")
_NAME_LIMIT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """NotBefore: empty where it has begun."""

    EventType: str
    Resources: tuple[str, ...]
    NotBefore: Annotated[str, pattern("[ -~]{0,200}", "a short text")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvents:
    Events: tuple[ScheduledEvent, ...]


class Azure:
    name = "Azure"

    def __init__(self, service: MetadataService) -> None:
        self.url = service.url
        self._service = service
        self._machine: str | None = None
        self._has_events = False

    def ask(self) -> str | None:
        """What takes this VM away, if an event says so. Raises NoAnswer."""
        if self._machine is None:
            self._machine = self._own_name()
        answer = self._get(_EVENTS, ANSWER_S if self._has_events else FIRST_ANSWER_S)
        try:
            found = decode(ScheduledEvents, answer.body, what="scheduledevents", exact=False)
        except ValueError as error:
            raise NoAnswer(str(error)) from error
        self._has_events = True
        for event in found.Events:
            if event.EventType in _TAKES_AWAY and self._machine in map(str.casefold, event.Resources):
                when = f", not before {event.NotBefore}" if event.NotBefore else ""
                return f"{event.EventType}{when}"
        return None

    def _own_name(self) -> str:
        name = self._get(_NAME, ANSWER_S).text
        if not name or len(name) > _NAME_LIMIT or not name.isprintable():
            raise NoAnswer("an answer that is no name of a VM")
        return name.casefold()  # names of Azure are alike in both cases

    def _get(self, path: str, answer_s: float) -> Answer:
        answer = self._service.ask(path, _HEADERS, answer_s=answer_s)
        answer.expect_ok()
        return answer
