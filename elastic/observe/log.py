"""An event is one JSON line, appended whole by the only process that writes its file.

Writing an event never ends training, and never waits for the disk. So it does not promise that a
line reached the disk: a power cut may lose the newest ones.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from elastic.events import KINDS, Event
from elastic.observe import logged_event
from elastic.observe.logged_event import E, Events, LoggedEvent, of_kind
from elastic.system.clock import Clock
from elastic.system.files import listing
from elastic.system.growing_file import AppendedFile, lines_of
from elastic.system.untrusted import parse_json

T = TypeVar("T")


class EventLog:
    def __init__(self, path: Path, *, node: str, clock: Clock) -> None:
        self._file = AppendedFile(path)
        self._node = node
        self._clock = clock
        self.generation = 0

    def record(self, event: Event) -> None:
        now_s = self._clock.wall()
        logged = LoggedEvent(time=now_s, node=self._node, generation=self.generation, event=event)
        self._file.append(logged.to_json())


def read_events(directory: Path) -> Events:
    """All events of a run, of all nodes, `in_order`; other lines are left out.

    Raises OSError for a file that cannot be read: a report must not leave it out.
    """
    paths = [path for path in listing(directory) if path.suffix == ".jsonl"]
    return logged_event.in_order(parse_lines(chain.from_iterable(map(lines_of, paths)), logged_event.parse))


def read_rare(directory: Path, kind: type[E]) -> list[LoggedEvent[E]]:
    """Events of one kind, in no order; others are not parsed, since a restart waits for these.

    Files that cannot be read are left out, because they must not end a worker.
    """
    name = next(name for name, each in KINDS.items() if each is kind).encode()
    found: list[bytes] = []
    with suppress(OSError):
        for path in directory.glob("*.jsonl"):
            with suppress(OSError):
                found += [line for line in lines_of(path) if name in line]
    return of_kind(list(parse_lines(found, logged_event.parse)), kind)


def parse_lines(lines: Iterable[bytes], parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """What `parse` makes of the lines that hold a JSON object, unless it raises ValueError."""
    for line in lines:
        with suppress(ValueError):
            record = parse_json(line.decode(errors="replace"))
            if isinstance(record, dict):
                yield parse(record)
