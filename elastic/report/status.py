"""Where a run stands now, as one value made of its events, its newest step and the age of its nodes' signs of life.

It does not promise to be newer than a sign of life: an agent that was killed counts as alive for `ALIVE_WITHIN_S`.
"""

from typing import Any

from elastic.events import GOODBYES

Record = dict[str, Any]

ALIVE_WITHIN_S = 10.0


def status(events: list[Record], newest: Record | None, beat_ages_s: dict[str, float], now: float) -> Record:
    """The state of a run; `now` and event times in seconds since 1970, `newest` is its newest line of metrics, `beat_ages_s` of each node.

    `state` is `finished`; `running` while an agent gives signs of life; else `failed`, `drained` (stopped as planned,
    checkpoint committed) or `interrupted` (nobody is there and nobody said goodbye: a power cut, a SIGKILL of all). The same
    command resumes a run that is drained or interrupted. `steps` is null until the run has told its length.
    """
    start = _last(events, "generation_started")
    state = _state(events, start, alive=_is_stepping(events, newest, now) or _is_beating(events, beat_ages_s))
    told = _last(events, "run_started") or _last(events, "run_finished")
    saved = _last(events, "checkpoint_committed")
    return {
        "state": state,
        "step": newest["step"] if newest else 0,
        "steps": told["steps"] if told else None,
        "generation": start["generation"] if start else 0,
        "world_size": start["world_size"] if start and state == "running" else 0,
        "workers": _workers(events, start["generation"]) if start and state == "running" else [],
        "last_checkpoint": {"step": saved["step"], "age_s": max(0.0, now - saved["time"])} if saved else None,
    }


def _state(events: list[Record], start: Record | None, *, alive: bool) -> str:
    if _last(events, "run_finished"):
        return "finished"
    since = start["time"] if start else 0.0
    current = [e for e in events if e["time"] >= since]
    if _last(current, "run_failed"):
        return "failed"
    if alive:
        return "running"
    return "drained" if _last(current, "run_interrupted") else "interrupted"


def _is_beating(events: list[Record], beat_ages_s: dict[str, float]) -> bool:
    """A node that said goodbye is not alive, however young its last beat: each process of an agent is a node of its own."""
    gone = {e["node"] for e in events if e["event"] in GOODBYES}
    return any(age_s < ALIVE_WITHIN_S for node, age_s in beat_ages_s.items() if node not in gone)


def _is_stepping(events: list[Record], newest: Record | None, now: float) -> bool:
    """A step is a sign of life as well: the nodes may beat in a folder that is not the run's."""
    if newest is None or "time" not in newest or now - newest["time"] >= ALIVE_WITHIN_S:
        return False
    return not any(e["event"] in GOODBYES and e["time"] >= newest["time"] for e in events)


def _workers(events: list[Record], generation: int) -> list[Record]:
    """Those that started in a generation and have not exited."""
    mine = [e for e in events if e.get("generation") == generation]
    gone = {(e["node"], e["pid"]) for e in mine if e["event"] == "worker_exited"}
    there = [e for e in mine if e["event"] == "worker_started" and (e["node"], e["pid"]) not in gone]
    return [
        {"rank": e["rank"], "node": e["node"], "pid": e["pid"]}
        for e in sorted(there, key=lambda e: int(e["rank"]))
    ]


def _last(events: list[Record], name: str) -> Record | None:
    return next((e for e in reversed(events) if e["event"] == name), None)
