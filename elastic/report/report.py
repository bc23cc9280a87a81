"""What a run did, said from its events and metrics alone; no duration is negative and the phases of a recovery add up to its total.

It does not promise precision across nodes: times are those of each node's own wall clock, and an order that clocks got
wrong shows as a phase of 0 seconds. What no event tells is null, never a guess.
"""

import math
from itertools import pairwise
from statistics import median
from typing import Any

Record = dict[str, Any]

# A fault that let the group finish more steps than these (the one in flight, and the one a drain still takes) did not end it.
_STEPS_AFTER_A_FAULT = 2
_SIGNS = ("worker_exited", "worker_failed", "hang_detected", "drain_requested", "generation_ended")


def summarise(events: list[Record], metrics: list[Record]) -> Record:
    """The report of a run.

    `events` are ordered by time, `metrics` by step. `goodput` is the share of the run's time that went into steps that
    count: the sum of their seconds over the time from the first generation's start to the last event or step. The time between a
    planned stop (`run_interrupted`) and the generation that resumes is not part of the run; the time after a crash of all nodes is.
    """
    finished = _last(events, "run_finished")
    total = _last(events, "run_started")
    steps = int(metrics[-1]["step"]) if metrics else 0
    return {
        "finished": finished is not None,
        "steps": finished["steps"] if finished else steps,
        "epochs": finished["epochs"] if finished else _epochs_done(steps, total),
        "final_digest": finished["digest"] if finished else None,
        "lost_steps": sum(int(e.get("lost_steps", 0)) for e in events if e["event"] == "restored"),
        "goodput": _goodput(events, metrics),
        "step_time_s": _step_time_s(metrics),
        "checkpoints": {
            "committed": _count(events, "checkpoint_committed"),
            "failed": _count(events, "checkpoint_failed"),
        },
        "snapshots": _snapshots(events),
        "generations": _generations(events, metrics),
        "recoveries": _recoveries(events, metrics),
    }


def _snapshots(events: list[Record]) -> Record | None:
    """What `--snapshot-every auto` chose last: steps from one snapshot to the next, and the costs behind it; None where nothing was chosen."""
    chosen = _last(events, "snapshot_interval")
    return None if chosen is None else {name: chosen[name] for name in ("every", "cost_s", "step_s")}


def _epochs_done(steps: int, total: Record | None) -> int:
    if total is None or not total.get("steps"):
        return 0
    return int(steps * total["epochs"] // total["steps"])


def _step_time_s(metrics: list[Record]) -> dict[str, float | None]:
    seconds = sorted(float(m["seconds"]) for m in metrics if m.get("seconds") is not None)
    if not seconds:
        return {"median": None, "p99": None}
    return {"median": median(seconds), "p99": seconds[math.ceil(0.99 * len(seconds)) - 1]}


def _goodput(events: list[Record], metrics: list[Record]) -> float | None:
    """Between 0 and 1; None before the first generation."""
    starts = _starts(events)
    if not starts:
        return None
    end = max([events[-1]["time"], *(m["time"] for m in metrics[-1:] if "time" in m)])
    wall_s = end - starts[0]["time"] - sum(_pauses_s(events))
    useful_s = sum(float(m.get("seconds") or 0.0) for m in metrics)
    return min(1.0, useful_s / wall_s) if wall_s > 0 else None


def _pauses_s(events: list[Record]) -> list[float]:
    pauses = []
    for before, after in pairwise(_starts(events)):
        stop = _announced_stop(events, before, after)
        if stop is not None:
            pauses.append(max(0.0, after["time"] - stop["time"]))
    return pauses


def _announced_stop(events: list[Record], before: Record, after: Record) -> Record | None:
    """The planned stop of the whole run between two generations, if that is what parts them.

    One node that leaves while others train on writes the same event, but then the next generation is no resume.
    """
    if after["cause"] != "resume":
        return None
    return _last([e for e in events if before["time"] <= e["time"] <= after["time"]], "run_interrupted")


def _generations(events: list[Record], metrics: list[Record]) -> list[Record]:
    kept: dict[int, int] = {}
    for line in metrics:
        kept[line.get("generation", 0)] = int(line["step"])
    return [_generation(start, _of(events, start["generation"]), kept) for start in _starts(events)]


def _generation(start: Record, events: list[Record], kept: dict[int, int]) -> Record:
    """The steps that a generation trained, those that were lost later included; None where it trained none."""
    restored = _first(events, "restored")
    ended = [int(e["step"]) for e in events if e["event"] == "generation_ended"]
    last = max([*ended, kept.get(start["generation"], 0)])
    trained = restored is not None and last > int(restored["step"])
    return {
        "generation": start["generation"],
        "world_size": start["world_size"],
        "nodes": start["nodes"],
        "first_step": int(restored["step"]) + 1 if restored is not None and trained else None,
        "last_step": last if trained else None,
        "cause": start["cause"],
    }


def _recoveries(events: list[Record], metrics: list[Record]) -> list[Record]:
    """One for each generation that is not the start of the run.

    After a planned stop the clock starts with the generation that resumes: how long the run lay still says nothing about it.
    """
    starts = _starts(events)
    return [
        _recovery(events, metrics, before, start)
        for before, start in zip([None, *starts], starts, strict=False)
        if start["cause"] != "start"
    ]


def _recovery(events: list[Record], metrics: list[Record], before: Record | None, start: Record) -> Record:
    restored = _last(_of(events, start["generation"]), "restored")
    first_step = _first(_of(events, start["generation"]), "first_step")
    fault_time, end_time = None, None
    if before is not None and _announced_stop(events, before, start) is None:
        fault_time, end_time = _fault(_of(events, before["generation"]), metrics, before["generation"])
    begin = start["time"] if fault_time is None else fault_time
    marks = [begin, end_time, start["time"], _time(restored), _time(first_step)]
    detect, rendezvous, restore, step = _phases_s(marks)
    return {
        "cause": start["cause"],
        "lost_steps": int(restored["lost_steps"]) if restored else 0,
        "source": restored["source"] if restored else None,
        "detect_s": detect,
        "rendezvous_s": rendezvous,
        "restore_s": restore,
        "first_step_s": step,
        "total_s": max(m for m in marks if m is not None) - begin if first_step else None,
    }


def _phases_s(marks: list[float | None]) -> list[float | None]:
    """The time between neighbouring marks; None where one of the two is unknown.

    A mark that is earlier than one before it (another node's clock) counts as simultaneous, so that phases still add up.
    """
    reached = -math.inf
    ordered: list[float | None] = []
    for mark in marks:
        reached = reached if mark is None else max(reached, mark)
        ordered.append(None if mark is None else reached)
    return [None if a is None or b is None else b - a for a, b in pairwise(ordered)]


def _fault(ended: list[Record], metrics: list[Record], generation: int) -> tuple[float | None, float | None]:
    """When a generation's fault first showed, and when its end was noticed; None where no event tells.

    A node that fell silent shows by nothing before it is missed: then it is the end of the last step before.
    """
    noticed = _time(_first(ended, "generation_ended"))
    signs = [e["time"] - float(e.get("silence_s", 0.0)) for e in ended if e["event"] in _SIGNS]
    if noticed is not None and min(signs) >= noticed:
        signs.append(_last_step_before(noticed, metrics, generation))
    injected = [
        e["time"]
        for e in ended
        if e["event"] == "fault_injected"
        and _steps_after(e["time"], metrics, generation) <= _STEPS_AFTER_A_FAULT
    ]
    first_sign = min(injected[-1:] + signs, default=None)
    return first_sign, noticed


def _last_step_before(time: float, metrics: list[Record], generation: int) -> float:
    times = [float(m["time"]) for m in metrics if m.get("generation") == generation and "time" in m]
    return max((t for t in times if t <= time), default=time)


def _steps_after(time: float, metrics: list[Record], generation: int) -> int:
    return sum(1 for m in metrics if m.get("generation") == generation and m.get("time", 0.0) > time)


def _starts(events: list[Record]) -> list[Record]:
    return [e for e in events if e["event"] == "generation_started"]


def _of(events: list[Record], generation: int) -> list[Record]:
    return [e for e in events if e.get("generation") == generation]


def _first(events: list[Record], name: str) -> Record | None:
    return next((e for e in events if e["event"] == name), None)


def _last(events: list[Record], name: str) -> Record | None:
    return _first(events[::-1], name)


def _count(events: list[Record], name: str) -> int:
    return sum(1 for e in events if e["event"] == name)


def _time(event: Record | None) -> float | None:
    return None if event is None else float(event["time"])
