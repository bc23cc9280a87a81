"""A run's events and metrics as their plain JSON: what tests judge, read without the product's
types.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def lines(path: Path) -> list[Record]:
    """The complete lines of a file that may be missing; its writer may have been killed inside
    one.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def events(folder: Path) -> list[Record]:
    """Of all nodes, by time."""
    found = [record for path in sorted(folder.glob("*.jsonl")) for record in lines(path)]
    return sorted(found, key=lambda record: float(record["time"]))


def matching(records: list[Record], name: str, /, **fields: Any) -> list[Record]:
    """The events of this name with these fields."""
    found = [record for record in records if record["event"] == name]
    return [record for record in found if all(record.get(key) == value for key, value in fields.items())]
