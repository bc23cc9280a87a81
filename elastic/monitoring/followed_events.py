"""Each event of a run is read once; a poll reads a bounded part.

A file of events has one writer and only grows, so that its size says whether it has news. It does
not promise an order between files.
"""

from collections.abc import Iterator
from pathlib import Path

from elastic.events import Event
from elastic.observe import logged_event
from elastic.observe.log import parse_lines
from elastic.observe.logged_event import LoggedEvent
from elastic.system.files import listing
from elastic.system.growing_file import LINE_LIMIT_BYTES, read_from, size_bytes

READ_BYTES = LINE_LIMIT_BYTES


class FollowedEvents:
    def __init__(self, folder: Path) -> None:
        self.is_at_end = False
        self._folder = folder
        self._positions: dict[Path, int] = {}

    def poll(self) -> Iterator[LoggedEvent[Event]]:
        """Raises OSError where the folder cannot be listed."""
        left, is_at_end = READ_BYTES, True
        for path in listing(self._folder):
            position = self._positions.get(path, 0)
            if path.suffix != ".jsonl" or size_bytes(path) <= position:
                continue
            if left <= 0:
                is_at_end = False
                break
            data = read_from(path, position, READ_BYTES)
            end = data.rfind(b"\n") + 1
            if len(data) == READ_BYTES:
                is_at_end = False
                end = end or len(data)  # a line that no reader of events takes
            left -= end
            self._positions[path] = position + end
            yield from parse_lines(data[:end].split(b"\n")[:-1], logged_event.parse)
        self.is_at_end = is_at_end
