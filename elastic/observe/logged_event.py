"""A line of an event file becomes a frozen event with the head that the log wrote, or is left out.

A reader takes lines of older and newer versions: of an event that it knows, fields that it does not
know are ignored, and missing ones take their defaults. An event that it does not know is a
recipe's. It does not promise that what an event claims is true.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar, cast, get_type_hints

from elastic.errors import UsageError
from elastic.events import KINDS, Event
from elastic.system.untrusted import decode

E = TypeVar("E", bound=Event)
E_co = TypeVar("E_co", bound=Event, covariant=True)


class _Head(TypedDict):
    event: str
    time: float
    node: str
    generation: int


HEAD = get_type_hints(_Head)


class RecipeEvent(Event):
    """An event that a recipe defines; `values` are its fields, any JSON, unchecked."""

    own_name: str
    values: dict[str, Any]

    @property
    def name(self) -> str:
        return self.own_name

    def fields(self) -> dict[str, Any]:
        return self.values


def check_event(name: Any, fields: Mapping[str, Any]) -> None:
    """Raises UsageError for an event of a recipe that would be taken for another, or is no JSON."""
    taken = next((each for each in fields if each in HEAD), None)
    if not isinstance(name, str) or not name or name in KINDS or taken is not None:
        found = f"the field {taken!r}, which the run itself sets" if taken else repr(name)
        raise UsageError(
            f"run.event: expected a name of the recipe's own, and fields of its own, found {found}"
            f"{', an event of the run itself' if isinstance(name, str) and name in KINDS and not taken else ''}; take another name"
        )
    for key, value in fields.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"run.event({name!r}, {key}=...): expected numbers, strings, or lists and dicts of them, found {type(value).__name__} "
                f"({error}); a tensor of one number is x.item()"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent(Generic[E_co]):
    """time: seconds since 1970. generation: 0 before the first one."""

    time: float
    node: str
    generation: int
    event: E_co

    def to_json(self) -> dict[str, Any]:
        head = {"event": self.event.name, "time": self.time, "node": self.node, "generation": self.generation}
        return head | self.event.fields()


Events = Sequence[LoggedEvent[Event]]


def parse(record: dict[str, Any]) -> LoggedEvent[Event]:
    """Raises ValueError for no event, a missing field, or a wrong one."""
    decode(_Head, record, what="an event", exact=False)
    values = {name: value for name, value in record.items() if name not in HEAD}
    event: Event = RecipeEvent(own_name=record["event"], values=values)
    if kind := KINDS.get(record["event"]):
        event = decode(kind, record, what="an event", exact=False)
    head = {name: record[name] for name in ("time", "node", "generation")}
    return LoggedEvent(**head, event=event)


def in_order(events: Iterable[LoggedEvent[E]]) -> list[LoggedEvent[E]]:
    """By generation, and within one by time."""
    return sorted(events, key=lambda each: (each.generation, each.time))


def of_kind(events: Events, kind: type[E]) -> list[LoggedEvent[E]]:
    return [cast("LoggedEvent[E]", each) for each in events if isinstance(each.event, kind)]


def first(events: Events, kind: type[E]) -> LoggedEvent[E] | None:
    return next(iter(of_kind(events, kind)), None)


def last(events: Events, kind: type[E]) -> LoggedEvent[E] | None:
    return next(iter(of_kind(events[::-1], kind)), None)


def by_generation(events: Events) -> Mapping[int, list[LoggedEvent[Event]]]:
    """For those who ask for one generation after another; one without events has an empty list."""
    found = defaultdict[int, list[LoggedEvent[Event]]](list)
    for each in events:
        found[each.generation].append(each)
    return found
