"""Stand-ins for what watches an agent: its parts, and a reader of TensorBoard's files."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from elastic.config.run_dir import RunDir
from elastic.system.clock import SystemClock


def agent(
    run: RunDir, *, is_first: bool = True, node: str = "a", print_line: Callable[[str], object] = print
) -> Any:
    """The parts of an agent that series and event files are made of."""
    options = SimpleNamespace(recipe="train.py")
    return SimpleNamespace(
        settings=SimpleNamespace(run=run, node=node, nproc=2, options=options, uid="run-1", run_id="12"),
        group=SimpleNamespace(is_first=is_first),
        health=SimpleNamespace(generation=2, still_s=0.5),
        console=SimpleNamespace(print_line=print_line),
        clock=SystemClock(),
        step=3,
    )


def shown(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """(step, value) of each tag of one run, as TensorBoard's pages show them."""
    events = EventAccumulator(str(folder), tensor_size_guidance={"scalars": 0})
    events.Reload()
    found: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    for tag in events.Tags()["tensors"]:
        found[tag] = [(each.step, make_ndarray(each.tensor_proto).item()) for each in events.Tensors(tag)]
    return found
