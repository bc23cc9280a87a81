"""Events of a log as tests write them: with the fields that matter, all others filled in."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args

from elastic.config.run_dir import RunDir
from elastic.events import KINDS, Event
from elastic.observe.logged_event import LoggedEvent
from elastic.observe.step_line import StepLine
from elastic.system.growing_file import AppendedFile

_EXAMPLES: dict[Any, Any] = {
    int: 1,
    float: 0.5,
    str: "x",
    bool: False,
    list[str]: ["x"],
    dict[str, str]: {"x": "y"},
    list[int]: [1],
    list[list[int]]: [[0], [1]],
}


def logged(
    name: str, time: float, generation: int = 1, node: str = "n1", **values: Any
) -> LoggedEvent[Event]:
    kind = KINDS[name]
    for each in fields(kind):
        values.setdefault(each.name, example(each.type))
    return LoggedEvent(time=time, node=node, generation=generation, event=kind(**values))


def started(
    time: float, generation: int, cause: str, nodes: Iterable[str] = ("n1", "n2"), world_size: int = 2
) -> LoggedEvent[Event]:
    about: dict[str, Any] = {"world_size": world_size, "nodes": [*nodes], "cause": cause}
    return logged("generation_started", time, generation, about["nodes"][0], **about)


def step(number: int, time: float, generation: int, seconds: float = 1.0) -> StepLine:
    return StepLine(step=number, time=time, generation=generation, seconds=seconds)


def record(run: RunDir, name: str, generation: int, time: float, node: str = "a", **values: Any) -> None:
    """Append an event to the run's files."""
    event = logged(name, time, generation, node, **values)
    AppendedFile(run.events / f"{node}.jsonl").append(event.to_json())


def example(kind: Any) -> Any:
    """A value of a field's type; None where that may be."""
    if kind in _EXAMPLES:
        return _EXAMPLES[kind]
    return None if type(None) in get_args(kind) else _EXAMPLES[str]
