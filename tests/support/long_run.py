"""A long run as its files would be: what reads a run must not need time or memory for all of it.

`python tests/support/long_run.py FOLDER [STEPS]` writes one of a million steps: a restart every
50 000 steps, a checkpoint every 500, an audit every 100. Nothing in it is random.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from elastic import events as kinds
from elastic.config.identity import Identity
from elastic.events import Event
from elastic.observe import metrics_files
from elastic.observe.logged_event import LoggedEvent

STEP_S = 0.05
BEGAN_S = 1_700_000_000.0
STEPS_OF_A_GENERATION = 50_000
STEPS_OF_A_CHECKPOINT = 500
LOST_STEPS = 40  # at each restart
STEPS_OF_AN_EPOCH = 1000
PAUSE_S = 3.0  # of each restart

IDENTITY = Identity(
    recipe="long.py",
    recipe_sha256="0" * 64,
    arguments=(),
    seed=0,
    global_batch=64,
    shards=8,
    torch="2.11.0",
    device="cpu",
    threads=1,
)


def write_long_run(folder: Path, steps: int) -> Path:
    """A finished run of `steps` steps."""
    events = folder / "events"
    events.mkdir(parents=True)
    (folder / "run.json").write_bytes(IDENTITY.to_json())
    (folder / "uid").write_text("long")
    newest = _generations(steps)
    own = metrics_files.own_file(folder / "metrics.jsonl", newest)
    with own.open("w") as file:
        file.writelines(map(_line, range(1, steps + 1)))
    os.link(own, folder / "metrics.jsonl")
    with (events / "n1-agent.jsonl").open("w") as file:
        file.writelines(json.dumps(each.to_json()) + "\n" for each in _events(steps))
    return folder


def _generations(steps: int) -> int:
    return max(1, -(-steps // STEPS_OF_A_GENERATION))


def _generation(step: int) -> int:
    return 1 + (step - 1) // STEPS_OF_A_GENERATION


def _time_s(step: int) -> float:
    """When the step ended."""
    return BEGAN_S + step * STEP_S + _generation(max(1, step)) * PAUSE_S


def _line(step: int) -> str:
    """As observe/step_line.py has it written; audits every hundred steps."""
    audited = ', "audited": true' if step % 100 == 0 else ""
    return (
        f'{{"lr": {1e-3 / (1 + step * 1e-6)}, "step": {step}, "epoch": {(step - 1) // STEPS_OF_AN_EPOCH},'
        f' "loss": {2.0 + (step * 37 % 1009) / 1009}, "chain": "{step * 2654435761 % 2**64:016x}", "world_size": 2,'
        f' "generation": {_generation(step)}, "time": {_time_s(step)}, "seconds": {STEP_S + (step * 7919 % 997) / 1e5}{audited},'
        f' "slowest_rank": {step * 31 % 7 % 2}, "slowest_s": {0.04 + (step * 13 % 101) / 1e5}, "others_s": 0.04}}\n'
    )


def _events(steps: int) -> Iterator[LoggedEvent[Event]]:
    """Of one node; each generation but the last is ended by a worker that died."""
    for generation in range(1, _generations(steps) + 1):
        before = (generation - 1) * STEPS_OF_A_GENERATION
        last = min(steps, generation * STEPS_OF_A_GENERATION)
        for time, event in _events_of(generation, before, last, steps):
            yield LoggedEvent(time=time, node="n1", generation=generation, event=event)


def _events_of(generation: int, before: int, last: int, steps: int) -> Iterator[tuple[float, Event]]:
    start_s, epochs, pids = (
        _time_s(before + 1) - STEP_S,
        steps // STEPS_OF_AN_EPOCH,
        [generation, -generation],
    )
    is_first = generation == 1
    cause = "start" if is_first else "failure"
    yield start_s - 1.0, kinds.GenerationStarted(world_size=2, nodes=["n1"], cause=cause, restarts=0)
    for rank, pid in enumerate(pids):
        yield start_s - 0.9, kinds.WorkerStarted(rank=rank, pid=pid)
    yield start_s - 0.2, kinds.RunStarted(steps=steps, epochs=epochs, seed=0, global_batch=64, shards=8)
    source, lost_steps = ("none", 0) if is_first else ("snapshot", LOST_STEPS)
    yield start_s - 0.1, kinds.Restored(step=before, source=source, lost_steps=lost_steps, seconds=0.1)
    yield start_s + STEP_S, kinds.FirstStep(step=before + 1)
    for step in range(before + STEPS_OF_A_CHECKPOINT, last + 1, STEPS_OF_A_CHECKPOINT):
        committed = kinds.CheckpointCommitted(step=step, size_bytes=10**6, seconds=0.2, digest="d" * 64)
        yield _time_s(step), committed
    if last == steps:
        yield _time_s(last) + 0.5, kinds.RunFinished(steps=steps, epochs=epochs, digest="d" * 64)
        return
    died = kinds.WorkerExited(rank=0, pid=pids[0], code=-9, signal="SIGKILL", victim=False)
    yield _time_s(last) + 0.1, died
    yield _time_s(last) + 0.2, kinds.GenerationEnded(step=last + LOST_STEPS, cause="failure")


if __name__ == "__main__":
    write_long_run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
