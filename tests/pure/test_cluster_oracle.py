"""The oracle of the scenarios finds every kind of wrong run; one that accepts all would go
unnoticed.
"""

from dataclasses import replace

import pytest
from oracle import Evidence, Injection, history, judge

STEPS = 6


def event(name, time, node="n1", generation=1, **fields):
    return {"event": name, "time": time, "node": node, "generation": generation, **fields}


def line(step, generation=1):
    return {"step": step, "chain": f"c{step}", "time": 100.0 + step, "generation": generation}


def samples(generation, step, shard):
    """Two shards of two samples in each step, three steps in each epoch of twelve samples."""
    epoch, place = divmod(step - 1, 3)
    first = 4 * place + 2 * shard
    return {
        "generation": generation,
        "step": step,
        "epoch": epoch,
        "shard": shard,
        "samples": [first, first + 1],
    }


def run():
    """Two nodes train six steps; n2 is lost after step 3, n1 goes on and commits steps 2 and 6."""
    return Evidence(
        events=[
            event("generation_started", 100.0, world_size=2, nodes=["n1", "n2"], cause="start"),
            event("restored", 100.1, step=0, source="none", lost_steps=0),
            event("checkpoint_committed", 102.1, node="n2", step=2),
            event("generation_ended", 103.5, step=3),
            event("generation_started", 103.8, generation=2, world_size=1, nodes=["n1"], cause="node lost"),
            event("restored", 103.9, generation=2, step=3, source="snapshot", lost_steps=0),
            event("checkpoint_committed", 106.5, generation=2, step=6),
            event("run_finished", 107.0, generation=2, digest="d" * 64),
        ],
        metrics=[line(step, 1 if step < 4 else 2) for step in range(1, STEPS + 1)],
        commits=[{"step": 2, "digest": "s2"}, {"step": 6, "digest": "s6"}],
        injections=[Injection(time=103.2, step=3, generation=1)],
        samples=[
            # Both nodes began step 4 in generation 1, and it did not count.
            *(samples(1, step, shard) for step in range(1, 5) for shard in range(2)),
            *(samples(2, step, shard) for step in range(4, STEPS + 1) for shard in range(2)),
        ],
    )


def problems(found):
    return judge(found, run(), within_s=1.0).problems


def test_a_correct_run_survives_and_is_measured():
    verdict = judge(run(), run(), within_s=1.0)

    assert verdict.survived
    assert verdict.digest == "d" * 64
    assert verdict.lost_steps == 0
    assert verdict.next_step_s == pytest.approx(0.8)
    assert history(run().events) == [
        "generation 1: 2 workers, start; restored step 0 from none",
        "generation 2: 1 workers, node lost; restored step 3 from snapshot",
    ]


def with_events(change):
    found = run()
    return replace(found, events=sorted(change(list(found.events)), key=lambda e: e["time"]))


def with_samples(change):
    found = run()
    return replace(found, samples=change(list(found.samples)))


def with_metrics(change):
    found = run()
    return replace(found, metrics=change(list(found.metrics)))


WRONG = {
    "another digest": (
        with_events(lambda es: [*es[:-1], event("run_finished", 107.0, digest="e" * 64)]),
        "undisturbed digest",
    ),
    "no end": (with_events(lambda es: es[:-1]), "undisturbed digest"),
    "two ends": (with_events(lambda es: [*es, es[-1]]), "undisturbed digest"),
    "a step is missing": (with_metrics(lambda ms: [*ms[:2], *ms[3:]]), "missing [3]"),
    "a step is there twice": (with_metrics(lambda ms: [*ms[:3], *ms[2:]]), "repeated [3]"),
    "steps are out of order": (with_metrics(lambda ms: [ms[1], ms[0], *ms[2:]]), "in order"),
    "other samples": (
        with_metrics(lambda ms: [*ms[:4], ms[4] | {"chain": "x"}, ms[5]]),
        "chain value at step 5",
    ),
    "two commit records": (
        replace(run(), commits=[*run().commits, run().commits[0]]),
        "one commit of step 2",
    ),
    "two commits reported": (
        with_events(lambda es: [*es, event("checkpoint_committed", 102.2, step=2)]),
        "one commit of step 2",
    ),
    "another state": (
        replace(run(), commits=[{"step": 2, "digest": "x"}, run().commits[1]]),
        "checkpoint of step 2, found another",
    ),
    "no checkpoint": (replace(run(), commits=[]), "a checkpoint of the last step"),
    "damage": (replace(run(), damage=[{"step": 2, "reason": "torn"}]), "step 2: torn"),
    "damage that is not seen": (replace(run(), damaged_steps=frozenset({2})), "step 2 to be found damaged"),
    "other damage than was done": (
        replace(run(), damaged_steps=frozenset({2}), damage=[{"step": s, "reason": "torn"} for s in (2, 6)]),
        "step 6: torn",
    ),
    "a sample twice": (
        with_samples(lambda ss: [*ss[:-1], ss[-1] | {"samples": [0, 10]}]),
        "1 that were trained more often",
    ),
    "a shard in the place of another": (
        with_samples(lambda ss: [*ss[:-1], ss[-1] | {"samples": ss[0]["samples"]}]),
        "2 that were trained more often",
    ),
    "a shard is missing": (with_samples(lambda ss: ss[:-1]), "others, or fewer"),
    "no samples": (with_samples(lambda _: []), "others, or fewer"),
    "a fenced commit": (
        with_events(lambda es: [*es, event("checkpoint_committed", 105.5, node="n2", step=4)]),
        "no commit from outside of generation 2, found one of step 4",
    ),
    "started over": (
        with_events(
            lambda es: [
                *es[:5],
                event("restored", 103.9, generation=2, step=0, source="none", lost_steps=3),
                *es[6:],
            ]
        ),
        "at step 0 after step 3",
    ),
    "too slow": (replace(run(), injections=[Injection(time=102.9, step=3, generation=1)]), "within 1 s"),
    "no new step": (with_metrics(lambda ms: ms[:3]), "missing [4, 5, 6]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_kind_of_wrong_run_is_reported(name):
    """One thing is wrong with an otherwise correct run."""
    found, problem = WRONG[name]

    assert any(problem in said for said in problems(found)), problems(found)


def test_a_commit_is_judged_by_when_its_record_was_created():
    """A node that is frozen after its commit writes the event when it wakes, in a later
    generation.
    """
    late = with_events(lambda es: [*es, event("checkpoint_committed", 105.5, node="n2", step=4)])
    record = {"step": 4, "digest": "s4", "created": 102.0}

    assert not problems(replace(late, commits=[*late.commits, record]))
    assert problems(replace(late, commits=[*late.commits, record | {"created": 105.4}]))


def test_a_checkpoint_that_was_damaged_on_purpose_is_not_held_against_the_run():
    found = replace(run(), damaged_steps=frozenset({2}), damage=[{"step": 2, "reason": "torn"}])

    assert not problems(found)


def test_a_shard_that_an_audit_computed_again_is_not_held_against_the_run():
    assert not problems(with_samples(lambda ss: [*ss, ss[-1]]))


def test_a_recipe_that_records_no_samples_is_judged_by_everything_else():
    assert judge(replace(run(), samples=[]), replace(run(), samples=[]), within_s=1.0).survived


def test_a_commit_right_after_a_generation_opened_is_accepted():
    found = with_events(lambda es: [*es, event("checkpoint_committed", 104.0, node="n2", step=4)])

    assert not problems(found)


def test_a_drain_is_measured_to_the_first_step_of_the_next_generation():
    """A drain still finishes its step; counting that step would hide how long the group stood
    still.
    """
    found = replace(run(), injections=[Injection(time=101.5, step=1, generation=1)])

    assert judge(found, run(), within_s=9.0).next_step_s == pytest.approx(2.5)
