"""A report follows from the events and the metrics of a run, and never claims too much."""

import io
import json
from dataclasses import asdict

import pytest
from logged import logged, started, step
from records import PARENT
from rich.console import Console
from viewed import viewed

from elastic.observe.doubts import told_at_the_end
from elastic.report.figures import report_json
from elastic.report.tables import report_tables


def summarise(events, lines, parent=None):
    """What `report --json` prints."""
    return json.loads(json.dumps(report_json(viewed(events, lines, parent=parent)), default=asdict))


def printed(events, lines=()):
    console = Console(width=300, file=io.StringIO())
    console.print(report_tables("run", viewed(events, lines)))
    return console.file.getvalue()


KILLED = [
    started(100.0, 1, "start"),
    logged("run_started", 101.0, steps=20, epochs=4, seed=0, global_batch=8, shards=8),
    logged("restored", 101.0, step=0, source="none", lost_steps=0, seconds=0.1),
    logged("first_step", 102.0, step=1),
    logged("worker_exited", 110.1, rank=1, signal="SIGKILL"),
    logged("generation_ended", 110.2, cause="failure", step=8),
    started(110.5, 2, "failure", world_size=1),
    logged("restored", 111.0, 2, step=6, source="checkpoint", lost_steps=2, seconds=0.3),
    logged("first_step", 112.0, 2, step=9),
    logged("checkpoint_committed", 113.0, 2, step=8, size_bytes=1, seconds=0.1, digest="d"),
    logged("checkpoint_failed", 114.0, 2, step=9, reason="disk full"),
]
KILLED_STEPS = [step(n, 101.0 + n, 1) for n in range(1, 7)] + [step(n, 105.0 + n, 2) for n in range(7, 11)]


def test_a_step_that_only_survivors_finished_does_not_count():
    """Rank 0 dies before it writes the line of step 9, which n2 has finished. So the run is back at
    step 9, having lost two: 7 and 8. The same where the next generation dies before its restore,
    and where both agents leave no event.
    """
    survivor = logged("generation_ended", 110.2, node="n2", cause="node lost", step=9)
    begin, after = [*KILLED[:4], survivor], KILLED[6:]
    first, second = summarise([*begin, *after], KILLED_STEPS)["generations"]
    assert (first["last_step"], second["first_step"]) == (8, 7)

    dies = [started(110.25, 2, "node lost"), logged("generation_ended", 110.3, 2, node="n2", step=0)]
    later = [logged(each.event.name, each.time, 3, **each.event.fields()) for each in after]
    lines = [step(n, 101.0 + n, 1 if n < 7 else 3) for n in range(1, 11)]
    found = summarise([*begin, *dies, *later], lines)["generations"]
    assert [each["last_step"] for each in found] == [8, None, 10]
    assert summarise(begin, KILLED_STEPS[:6])["generations"][0]["last_step"] == 9
    assert summarise([*KILLED[:4], *after], KILLED_STEPS)["generations"][0]["last_step"] == 8


@pytest.mark.parametrize(("steps", "epochs"), [(20, 2), (24, 3), (16, 2), (7, 0)])
def test_an_epoch_that_is_not_whole_is_not_complete(steps, epochs):
    sizes = {"seed": 0, "global_batch": 8, "shards": 8, "steps_per_epoch": 8}
    begun = logged("run_started", 100.1, steps=20, epochs=3, **sizes)
    assert summarise([started(100.0, 1, "start"), begun], [step(steps, 101.0, 1)])["epochs"] == epochs


def test_a_run_that_failed_says_why_until_it_goes_on():
    """A resume begins a generation of its own, and its end is the one that counts."""
    why = {"exit_code": 1, "reason": "rank 0 ended with exit code 1 (no data)"}
    end = logged("run_failed", 120.0, 2, **why)
    assert summarise([*KILLED, end], KILLED_STEPS)["failed"] == why
    assert summarise([*KILLED, end, started(121.0, 3, "resume")], KILLED_STEPS)["failed"] is None


def test_step_times_are_the_median_and_the_slowest_of_a_hundred():
    metrics = [step(n, 100.0 + n, 1, seconds=n / 100) for n in range(1, 101)]
    assert summarise([], metrics)["step_time_s"] == {"median": pytest.approx(0.505), "p99": 0.99}


def test_the_report_of_a_run_without_events_has_every_key():
    found = summarise([], [])
    assert found.keys() == summarise(KILLED, KILLED_STEPS).keys()
    assert (found["goodput"], found["steps"], found["generations"]) == (None, 0, [])


def test_a_run_past_its_last_step_says_what_its_process_lacked():
    """Code after the loop may save what the last forward left in an attribute."""
    assert "it had no step to train" in told_at_the_end(KILLED, 6)
    assert told_at_the_end(KILLED, 10) == ""


def test_a_step_that_came_out_otherwise_is_told():
    """Once the run ended there, and once it went on, since the recipe was edited."""
    values = {"step": 9, "restored": 6, "loss_before": 0.5, "loss_now": None}
    ended = logged("replay_differed", 112.5, 2, excuse="", **values)
    excused = logged("replay_differed", 113.5, 2, excuse="the recipe was edited in between", **values)
    edited = logged("recipe_edited", 113.0, 2, step=4)

    assert summarise([*KILLED, ended], KILLED_STEPS)["replays"] == [values | {"excuse": ""}]
    assert told_at_the_end([*KILLED, ended], 10).startswith("; step 9 gave another result")
    text = printed([*KILLED, ended, edited, excused], KILLED_STEPS)
    words = "step 9, from the state of step 6: loss 0.5 then, none when it was done again; "
    assert words + "the run ended there" in text
    assert words + "the run went on, since the recipe was edited in between" in text
    assert "after step 4: another text of the recipe" in text


def test_a_lineage_is_reported_oldest_first():
    """Of three runs. The folders of the first two may be gone: the third one's run.json has all."""
    first, second = summarise([], [], PARENT)["lineage"]
    assert first == asdict(PARENT.ancestors[0])
    assert second == {"run_id": PARENT.run_id, "step": PARENT.step, "digest": PARENT.digest}


def test_the_newest_numbers_of_shards_are_shown_by_rank():
    """A new generation begins with equal spans, whatever the one before had."""
    begun = [started(100.0, 1, "start"), started(200.0, 2, "failure")]
    moved = [logged("shards_moved", 100.0 * at, at, shards=[at, 3, 0, 3]) for at in (1, 1, 2)]
    assert summarise(begun[:1] + moved[:2], [])["shards_by_rank"] == [1, 3, 0, 3]
    assert summarise(begun + moved[:2], [])["shards_by_rank"] == []
    assert "0 on 1 rank; 2 on 1 rank; 3 on 2 ranks" in printed([*begun, *moved])


def test_divergences_are_listed_with_who_was_wrong():
    """Step 40 was judged, and either of two nodes was wrong; the run ended over step 90, which is
    the recipe's; step 95 of another attempt was never done again.
    """
    events = [
        started(100.0, 1, "start"),
        logged("divergence_detected", 101.0, step=40, entry="m.w"),
        logged("divergence_judged", 102.0, 2, step=40, entry="m.w", nodes=["a", "b"], verdict="machine"),
        logged("divergence_judged", 103.0, 3, step=90, entry="m.v", nodes=[], verdict="recipe"),
        logged("divergence_detected", 104.0, 4, step=95, entry=""),
    ]
    found = summarise(events, [])["divergences"]
    assert [tuple(each[name] for name in ("step", "node", "entry", "verdict")) for each in found] == [
        *((40, node, "m.w", "machine") for node in "ab"),
        (90, None, "m.v", "recipe"),
        (95, None, "", None),
    ]


def test_jobs_that_started_nodes_are_reported_with_restarts():
    """A task of an array after it was requeued; a job outside an array."""
    task = {"scheduler": "slurm", "job": "14", "array_job": "12", "array_task": 3, "host": "gpu-7"}
    plain = {"scheduler": "slurm", "job": "15", "array_job": None, "array_task": None, "host": ""}
    jobs = [("n2", task | {"restarts": 1}), ("n3", plain | {"restarts": None})]
    events = [logged("node_scheduled", 99.0, 0, node, **job) for node, job in jobs]
    found = summarise([*events, *KILLED], KILLED_STEPS)["scheduled"]
    assert found == [{"node": node} | job for node, job in jobs]
