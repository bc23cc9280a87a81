"""Run directories of any length, with faults or hostile names, that were never trained."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from logged import logged, started
from records import IDENTITY

from elastic.events import Event
from elastic.observe import metrics
from elastic.observe.logged_event import LoggedEvent
from elastic.observe.run_view import Record, view_of
from elastic.observe.series import LoggedValues
from elastic.observe.step_columns import StepBatch, columns_of
from elastic.observe.step_line import StepLine
from elastic.report.page import page_of

BEGAN = 1_790_000_000.0
STEP_S = 0.25
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028<!--"

Logged = list[LoggedEvent[Event]]


def write(folder: Path, events: Iterable[LoggedEvent[Event]], lines: Iterable[StepLine]) -> Path:
    (folder / "events").mkdir(parents=True)
    text = "".join(json.dumps(each.to_json()) + "\n" for each in events)
    (folder / "events" / "all.jsonl").write_text(text)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line.to_json()) + "\n" for line in lines))
    return folder


def drawn(
    events: Logged, lines: Sequence[StepLine], *, name: str = "runs/x", now_s: float = math.inf
) -> dict[str, Any]:
    """The page of a run that is only values. now_s: where the run goes on, seconds since 1970."""
    steps, logged = columns_of(lines), LoggedValues()
    logged.add(StepBatch(lines=lines))
    seen_s = [each.time for each in events] + [each.time or 0.0 for each in lines]
    record = Record(
        events=events,
        steps=steps,
        newest=lines[-1] if lines else None,
        age_s=min(now_s - max(seen_s, default=0.0), 1e7),
        curves=logged.curves(steps),
    )
    return page_of(name, view_of(record, {"alive": 1.0} if now_s < math.inf else {}))


def line(step: int, time: float, generation: int, **values: Any) -> StepLine:
    loss = 2.0 * math.exp(-step / 3000) + 0.3 + 0.05 * math.sin(step * 12.9898)
    values = {
        "lr": 1e-3 * (1 + math.cos(step / 8000)),
        "grad_norm": 1 + abs(math.sin(step * 78.233)),
    } | values
    own: dict[str, Any] = {"time": time, "seconds": STEP_S, "generation": generation, "world_size": 2}
    return StepLine(step=step, loss=values.pop("loss", loss), chain=f"{step:016x}", **own, values=values)


def of_generations(count: int, steps_each: int, *, num_nodes: int = 3) -> tuple[Logged, list[StepLine]]:
    """Causes take turns; a node is lost and another one comes in every fourth generation."""
    events, lines = [], []
    time, step = BEGAN, 0
    nodes = [f"spot-{index}-100-{index:08x}" for index in range(num_nodes)]
    causes = ("node joined", "failure", "node lost", "node left")
    generation = 0

    def tell(name: str, at: float, node: int = 0, **fields: Any) -> None:
        events.append(logged(name, at, generation, nodes[node], **fields))

    for generation in range(1, count + 1):
        cause = causes[generation % 4] if generation > 1 else "start"
        if cause == "node lost":
            nodes = [*nodes[1:], f"spot-{generation % 5}-{generation}-{generation:08x}"]
        events.append(started(time, generation, cause, nodes, 2 * len(nodes)))
        tell("restored", time + 1.2, step=step, source="peer", lost_steps=generation % 3)
        tell("run_started", time + 1.1, steps=count * steps_each)
        time += 2.0
        for _ in range(steps_each):
            step += 1
            time += STEP_S
            lines.append(line(step, time, generation))
        tell("first_step", time - (steps_each - 1) * STEP_S, step=step)
        tell("checkpoint_committed", time - STEP_S, step=step, size_bytes=2_400_000_000, seconds=3.1)
        if generation < count:
            tell("worker_exited", time + 0.1, node=-1, rank=1, code=None, signal="SIGKILL")
            tell("generation_ended", time + 0.4, cause="a worker ended", step=step)
            time += 1.0 + 7.0 * (generation % 7 == 0)
    tell("run_finished", time + 0.5, steps=step, epochs=3, digest="ab" * 32)
    return events, lines


def hostile() -> tuple[Logged, list[StepLine]]:
    """Every text of the run tries to end the element that it stands in."""
    name = HOSTILE
    events = [
        started(BEGAN, 1, name, [name, name + "2"]),
        logged("restored", BEGAN + 1, 1, name, step=0, source=name),
        logged("first_step", BEGAN + 2, 1, name, step=1),
        logged("fault_injected", BEGAN + 3, 1, name, fault=name, step=3),
        logged("worker_failed", BEGAN + 4, 1, name, rank=0, message=name, traceback=name * 4000),
        logged("run_failed", BEGAN + 5, 1, name, exit_code=1, reason=name),
        started(BEGAN + 4.5, 1, "failure", [name]),
    ]
    lines = [line(step, BEGAN + step, 1, **{name: float(step)}) for step in range(1, 4)]
    lines += [line(4, BEGAN + 4, 1, **{name: float("nan")}, loss=None), line(5, BEGAN + 5, 1, loss=1e99)]
    return events, lines


def write_whole(folder: Path, steps: int) -> Path:
    """A finished run with all that `clean` and `runs` look at."""
    generations = -(-steps // 50_000)
    write(folder, *of_generations(generations, steps // generations, num_nodes=1))
    (folder / "run.json").write_bytes(IDENTITY.to_json())
    (folder / "uid").write_text("long")
    os.link(folder / "metrics.jsonl", metrics.own_file(folder / "metrics.jsonl", generations))
    return folder
