"""Of what the loop changes and no State saves, the note names first what the result may depend on.

A variable has one name, however many of its items change. First come those that a function reads
which the loop names; last those that only grow, such as a history, and texts: they are mostly for
display. Nothing here knows for certain what is computed with, and all are named in the event.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum

from elastic.train.object_marks import Kind, Mark


class Standing(IntEnum):
    READ = 0  # by a function
    NUMBER = 1
    SHOWN = 2


def variable_of(path: str) -> str:
    """`history` of `history[3]['loss']`, and `meter.counts` of `meter.counts[0]`."""
    return path.partition("[")[0] or path


def root_of(path: str) -> str:
    """The variable of the script: `meter` of `meter.counts[0]`."""
    return path.partition("[")[0].partition(".")[0]


def standing(path: str, before: Mark | None, now: Mark, read: Iterable[str]) -> Standing:
    """read: the variables that functions read which the loop names."""
    if _is_shown(before, now):
        return Standing.SHOWN
    return Standing.READ if path.removeprefix("self.").partition(".")[0] in read else Standing.NUMBER


def in_order(paths: Mapping[str, Standing]) -> dict[str, None]:
    """The variables, each once. Its least shown part says where it stands."""
    found: dict[str, Standing] = {}
    for path, how in paths.items():
        name = variable_of(path)
        found[name] = min(how, found.get(name, how))
    return dict.fromkeys(sorted(found, key=found.__getitem__))


def _is_shown(before: Mark | None, now: Mark) -> bool:
    """Whether it is a text, or a container that has more items than before, and those as well."""
    if now.kind is not Kind.PLAIN:
        return False
    if isinstance(now.value, str):
        return now.value.startswith("str ")
    if before is None or not (isinstance(before.value, tuple) and isinstance(now.value, tuple)):
        return False
    (length, items), (earlier_length, earlier) = now.value, before.value
    return bool(length > earlier_length > 0 and items[: len(earlier)] == earlier)
