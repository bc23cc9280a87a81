"""A run is judged only by what it left behind, and by the same rules whatever faults hit it.

Every step must count exactly once. In the generation in which a step counts, its shards must have
had the samples of the undisturbed run, each once. The step's chain value, a sum over losses and
gradients of all steps so far, must be that of the undisturbed run. What left no trace is not seen:
an event can be lost with the process that wrote it.
"""

import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import run_records

from elastic.checkpoint.catalog import list_commits, verify
from elastic.checkpoint.payload_check import digest_of
from elastic.checkpoint.record import CommitRecord
from elastic.config.run_dir import RunDir
from elastic.errors import CheckpointDamaged
from elastic.storage.remote import open_store
from elastic.storage.store import Store
from elastic.system.clock import SystemClock

Record = dict[str, Any]
SAVES = ("--save-every", "4steps", "--keep", "99", "--rehearse", "off")
HOUR_S = 3600
AHEAD_S = {"jump": HOUR_S, "jump-back": -24 * HOUR_S}  # of a node's wall clock, after this fault

# A save that is just being committed learns of a new generation a moment after it opens
# (docs/guarantees.md, limits).
FENCE_TOLERANCE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """When a fault was injected, and the newest step and generation at that moment.

    time: seconds since 1970, by the wall clock of the machine that all nodes are on.
    """

    time: float
    step: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a run left behind.

    events: of all nodes, by time.
    metrics: the lines of the file, in its order.
    commits: step and digest of every commit record, and when it was created, if known.
    damage: step and reason of every checkpoint that does not load.
    samples: what each shard of each step had in each generation; empty if the recipe does not write
    it.
    damaged_steps: steps whose checkpoint a fault damaged on purpose.
    """

    events: Sequence[Record]
    metrics: Sequence[Record]
    commits: Sequence[Record]
    damage: Sequence[Record] = ()
    injections: Sequence[Injection] = ()
    samples: Sequence[Record] = ()
    damaged_steps: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """next_step_s: the longest time from a fault to the end of the next new step; None without a
    fault.
    """

    problems: tuple[str, ...]
    digest: str | None
    lost_steps: int
    next_step_s: float | None


def judge(found: Evidence, undisturbed: Evidence, within_s: float) -> Verdict:
    waits_s = [_next_step_s(injection, found.metrics) for injection in found.injections]
    problems = [
        *_digest_differs(found, undisturbed),
        *_steps_differ(found.metrics, undisturbed.metrics),
        *_samples_differ(found, undisturbed),
        *_commits_are_wrong(found, undisturbed),
        *_fenced_commits(found),
        *_started_over(found.events),
        *(
            f"expected a new step within {within_s:g} s of each fault, found {wait_s:.1f} s"
            for wait_s in waits_s
            if wait_s > within_s
        ),
    ]
    return Verdict(
        problems=tuple(problems),
        digest=next(iter(digests(found.events)), None),
        lost_steps=sum(int(e["lost_steps"]) for e in found.events if e["event"] == "restored"),
        next_step_s=max(waits_s, default=None),
    )


def digests(events: Sequence[Record]) -> list[str]:
    return [str(event["digest"]) for event in events if event["event"] == "run_finished"]


def history(events: Sequence[Record]) -> list[str]:
    """One line for each generation: world size, cause, and restored state.

    Nothing in it depends on speed or on the order in which nodes arrive.
    """
    lines = []
    for start in (e for e in events if e["event"] == "generation_started"):
        number = start["generation"]
        restored = [e for e in events if e["event"] == "restored" and e.get("generation") == number]
        line = f"generation {number}: {start['world_size']} workers, {start['cause']}"
        for event in restored[-1:]:
            lost = f", {event['lost_steps']} lost" if event["lost_steps"] else ""
            line += f"; restored step {event['step']} from {event['source']}{lost}"
        lines.append(line)
    return lines


def _digest_differs(found: Evidence, undisturbed: Evidence) -> Iterator[str]:
    there, expected = digests(found.events), digests(undisturbed.events)
    if there != expected:
        yield f"expected one end with the undisturbed digest {_short(expected)}, found {_short(there)}"


def _short(texts: list[str]) -> str:
    return ", ".join(text[:12] for text in texts) or "none"


def _steps_differ(found: Sequence[Record], undisturbed: Sequence[Record]) -> Iterator[str]:
    steps, expected = [line["step"] for line in found], [line["step"] for line in undisturbed]
    if steps != expected:
        counted = Counter(steps)
        twice = [step for step, times in counted.items() if times > 1]
        missing = [step for step in expected if step not in counted]
        yield f"expected each of {len(expected)} steps once and in order, found missing {missing}, repeated {twice}"
        return
    for mine, theirs in zip(found, undisturbed, strict=True):
        if mine["chain"] != theirs["chain"]:
            yield f"expected the undisturbed run's chain value at step {mine['step']}, found another: what was trained differs from there on"
            return


def _samples_differ(found: Evidence, undisturbed: Evidence) -> Iterator[str]:
    """Compare the samples of each step, in the generation in which the step counts."""
    expected = {(each["step"], each["shard"]): each["samples"] for each in undisturbed.samples}
    if not expected:
        return
    counts = {(line["step"], line["generation"]) for line in found.metrics}
    # An audit has computed some shards a second time, mostly on another rank; that is no training.
    there = {
        (each["step"], each["shard"], tuple(each["samples"])): each
        for each in found.samples
        if (each["step"], each["generation"]) in counts
    }.values()
    trained = Counter((each["epoch"], sample) for each in there for sample in each["samples"])
    twice = sum(times > 1 for times in trained.values())
    if twice:
        yield f"expected each sample once an epoch, found {twice} that were trained more often"
    if {(each["step"], each["shard"]): each["samples"] for each in there} != expected:
        yield f"expected the undisturbed run's samples in each of {len(expected)} shards, found others, or fewer"


def _commits_are_wrong(found: Evidence, undisturbed: Evidence) -> Iterator[str]:
    for damage in found.damage:
        if damage["step"] not in found.damaged_steps:
            yield f"expected every checkpoint to load, found damage: step {damage['step']}: {damage['reason']}"
    for step in sorted(found.damaged_steps - {damage["step"] for damage in found.damage}):
        yield f"expected the checkpoint of step {step} to be found damaged, as it is, found it taken for whole"
    # Two nodes that leave at one moment may both save the same state.
    committed = (e for e in found.events if e["event"] == "checkpoint_committed")
    for (step, node), times in Counter((int(e["step"]), e["node"]) for e in committed).items():
        if times > 1:
            yield f"expected one commit of step {step} by {node}, found {times}"
    states = {record["step"]: record["digest"] for record in undisturbed.commits}
    for record in found.commits:
        if record["digest"] and states.get(record["step"], record["digest"]) != record["digest"]:
            yield f"expected the undisturbed state in the checkpoint of step {record['step']}, found another"
    if not found.commits:
        yield "expected a checkpoint of the last step, found none"


def _fenced_commits(found: Evidence) -> Iterator[str]:
    """A node that is not a member of a newer generation may commit only until that one opens.

    The record says when it was created. Its event may be written much later: a node that was frozen
    between the two writes it when it wakes.
    """
    starts = [e for e in found.events if e["event"] == "generation_started"]
    created = {record["step"]: record["created"] for record in found.commits if "created" in record}
    for commit in (e for e in found.events if e["event"] == "checkpoint_committed"):
        time = min(commit["time"], created.get(commit["step"], math.inf))
        known = [s for s in starts if s["time"] < time - FENCE_TOLERANCE_S]
        newest = [s for s in starts if s["time"] <= commit["time"]]  # which it may just have joined
        if known and all(commit["node"] not in s["nodes"] for s in (known[-1], newest[-1])):
            yield f"expected no commit from outside of generation {known[-1]['generation']}, found one of step {commit['step']} by {commit['node']}"


def _started_over(events: Sequence[Record]) -> Iterator[str]:
    reached = 0
    for event in events:
        if event["event"] == "restored" and event["step"] == 0 and reached > 0:
            yield f"expected to go on from a saved state, found generation {event['generation']} at step 0 after step {reached}"
        if event["event"] in ("generation_ended", "checkpoint_committed", "first_step"):
            reached = max(reached, int(event["step"]))


def _next_step_s(injection: Injection, metrics: Sequence[Record]) -> float:
    """Seconds until the first new step of a newer generation, or of the same one if no other came.

    Infinite if there was no new step. A drain still finishes its own step, which says nothing about
    how long the group stood still. A fault after the last step costs nothing.
    """
    if metrics and injection.step == metrics[-1]["step"]:
        return 0.0
    new = [line for line in metrics if line["step"] > injection.step]
    newer = [line for line in new if line["generation"] > injection.generation]
    first = next(iter(newer or new), None)
    return math.inf if first is None else max(0.0, float(first["time"]) - injection.time)


# Evidence is read once: events of all nodes on one clock, and every checkpoint verified.


def evidence(
    run: RunDir,
    samples: Path | None = None,
    injections: Sequence[Injection] = (),
    *,
    damaged_steps: Collection[int] = (),
) -> Evidence:
    """Read everything that the run left behind, with the times of this machine's clock.

    samples: folder to which the recipe wrote the samples of each step.
    damaged_steps: checkpoints that a fault damaged on purpose.
    """
    store, clock = open_store(run.checkpoints_url), SystemClock()
    records, _ = list_commits(store, clock)
    now = time.time()
    commits = [
        {"step": each.step, "digest": _digest(store, each), "created": true_time(each.created, now)}
        for each in records
    ]
    return Evidence(
        events=on_this_clock(run_records.events(run.events)),
        metrics=[line | {"time": true_time(line["time"], now)} for line in run_records.lines(run.metrics)],
        commits=commits,
        damage=[asdict(damage) for damage in verify(store, clock)],
        injections=injections,
        samples=[] if samples is None else read_lines(samples),
        damaged_steps=frozenset(damaged_steps),
    )


def _digest(store: Store, record: CommitRecord) -> str:
    """Empty where it is damaged."""
    with suppress(CheckpointDamaged):
        return digest_of(store, record, SystemClock())
    return ""


def undisturbed(recipe: Path, folder: Path, *arguments: str) -> Evidence:
    """Of the recipe's run by one worker on this machine, in no container and without faults.

    folder: a new one.
    """
    samples = folder / "samples"
    samples.mkdir(parents=True)
    words = [sys.executable, "-m", "elastic.cli", str(recipe), "--run-dir", str(folder / "run"), *SAVES]
    env = os.environ | {"TINY_SAMPLES": str(samples)}
    subprocess.run([*words, "--", *arguments], check=True, stdout=subprocess.DEVNULL, env=env)
    return evidence(RunDir.parse(str(folder / "run")), samples)


def on_this_clock(events: Sequence[Record]) -> list[Record]:
    """By time, whatever the clocks of their nodes showed."""
    now = time.time()
    there = [event | {"time": true_time(event["time"], now)} for event in events]
    return sorted(there, key=lambda event: float(event["time"]))


def host(event: Record) -> str:
    """The node's host name, which is the container's name: a node's id begins with it."""
    return str(event["node"]).split("-", maxsplit=1)[0]


def read_lines(folder: Path) -> list[Record]:
    return [line for path in sorted(folder.glob("*.jsonl")) for line in run_records.lines(path)]


def jump_of(written: float, now: float) -> str | None:
    """Which jump a time shows that a node has written within the twelve hours before `now`."""
    if written > now:
        return "jump"
    return "jump-back" if written < now - 12 * HOUR_S else None


def true_time(written: float, now: float) -> float:
    """The time of this machine's own clock, in seconds since 1970, at which a node wrote that."""
    jump = jump_of(written, now)
    return written if jump is None else written - AHEAD_S[jump]
