"""The matrix on containers: its language is read, and its oracle accepts no wrong run."""

from dataclasses import replace
from pathlib import Path

import pytest
from oracle import Evidence, Injection, history, judge
from scenario import parse

SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios" / "cluster").glob("*.txt"))


def test_every_scenario_can_be_read():
    assert all(parse(path.stem, path.read_text()).expected for path in SCENARIOS)


def event(name, time, node="n1", generation=1, **fields):
    return {"event": name, "time": time, "node": node, "generation": generation, **fields}


def line(step):
    return {"step": step, "chain": f"c{step}", "time": 100.0 + step, "generation": 1 if step < 4 else 2}


def samples(generation, step):
    return {"generation": generation, "step": step, "epoch": 0, "shard": 0, "samples": [step]}


EVENTS = [
    event("generation_started", 100.0, world_size=2, nodes=["n1", "n2"], cause="start"),
    event("restored", 100.1, step=0, source="none", lost_steps=0),
    event("checkpoint_committed", 102.1, node="n2", step=2),
    event("generation_ended", 103.5, step=3),
    event("generation_started", 103.8, generation=2, world_size=1, nodes=["n1"], cause="node lost"),
    event("restored", 103.9, generation=2, step=3, source="snapshot", lost_steps=0),
    event("checkpoint_committed", 106.5, generation=2, step=6),
    event("run_finished", 107.0, generation=2, digest="d" * 64),
]
STEPS = [line(step) for step in range(1, 7)]
# Step 4 was begun in generation 1 as well, where it did not count.
SAMPLES = [*(samples(1, step) for step in range(1, 5)), *(samples(2, step) for step in range(4, 7))]
RUN = Evidence(
    events=EVENTS,
    metrics=STEPS,
    commits=[{"step": 2, "digest": "s2"}, {"step": 6, "digest": "s6"}],
    injections=[Injection(time=103.2, step=3, generation=1)],
    samples=SAMPLES,
)
WRONG = {
    "another digest": replace(RUN, events=[*EVENTS[:-1], event("run_finished", 107.0, digest="e" * 64)]),
    "a step is missing": replace(RUN, metrics=[*STEPS[:2], *STEPS[3:]]),
    "another chain": replace(RUN, metrics=[*STEPS[:5], STEPS[5] | {"chain": "x"}]),
    "two commits of a step by a node": replace(RUN, events=[*EVENTS, EVENTS[2]]),
    "another state": replace(RUN, commits=[{"step": 2, "digest": "x"}, RUN.commits[1]]),
    "damage": replace(RUN, damage=[{"step": 2, "reason": "torn"}]),
    "damage taken for whole": replace(RUN, damaged_steps=frozenset({2})),
    "a sample twice": replace(RUN, samples=[*SAMPLES[:-1], SAMPLES[-1] | {"samples": [5]}]),
    "a fenced commit": replace(
        RUN, events=[*EVENTS, event("checkpoint_committed", 105.5, node="n2", step=4)]
    ),
    "started over": replace(
        RUN, events=[*EVENTS[:5], event("restored", 103.9, generation=2, step=0, lost_steps=3), *EVENTS[6:]]
    ),
    "too slow": replace(RUN, injections=[Injection(time=102.9, step=3, generation=1)]),
}


def test_a_correct_run_survives_and_is_measured():
    verdict = judge(RUN, RUN, within_s=1.0)
    assert not verdict.problems and verdict.lost_steps == 0
    assert verdict.next_step_s == pytest.approx(0.8)
    assert history(EVENTS)[1] == "generation 2: 1 workers, node lost; restored step 3 from snapshot"


@pytest.mark.parametrize("found", WRONG.values(), ids=WRONG)
def test_each_kind_of_wrong_run_is_reported(found):
    assert judge(found, RUN, within_s=1.0).problems
