"""A report follows from the events and the metrics of a run, and never claims too much."""

import io
import json
from dataclasses import asdict, replace
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logged import logged
from records import PARENT
from rich.console import Console
from viewed import viewed

from elastic.events import FaultInjected, Restored, WorkerExited
from elastic.observe.doubts import told_at_the_end
from elastic.observe.step_line import StepLine
from elastic.report.figures import report_json
from elastic.report.tables import report_tables

by_time = attrgetter("time")


def summarise(events, lines, parent=None):
    """What `report --json` prints: as plain JSON."""
    return json.loads(json.dumps(report_json(viewed(events, lines, parent=parent)), default=asdict))


def started(time, generation, cause, world_size=2):
    return logged(
        "generation_started", time, generation, world_size=world_size, nodes=["n1", "n2"], cause=cause
    )


def step(number, time, generation, seconds=1.0):
    return StepLine(step=number, time=time, generation=generation, seconds=seconds)


KILLED = [
    started(100.0, 1, "start"),
    logged("run_started", 101.0, steps=20, epochs=4, seed=0, global_batch=8, shards=8),
    logged("restored", 101.0, step=0, source="none", lost_steps=0, seconds=0.1),
    logged("first_step", 102.0, step=1),
    logged("fault_injected", 110.0, fault="kill", step=9),
    logged("worker_exited", 110.1, rank=1, pid=7, code=None, signal="SIGKILL", victim=False),
    logged("generation_ended", 110.2, cause="failure", step=8),
    started(110.5, 2, "failure", world_size=1),
    logged("restored", 111.0, 2, step=6, source="checkpoint", lost_steps=2, seconds=0.3),
    logged("first_step", 112.0, 2, step=9),
    logged("checkpoint_committed", 113.0, 2, step=8, size_bytes=1, seconds=0.1, digest="d"),
    logged("checkpoint_failed", 114.0, 2, step=9, reason="disk full"),
]
KILLED_STEPS = [step(n, 101.0 + n, 1) for n in range(1, 7)] + [step(n, 105.0 + n, 2) for n in range(7, 11)]


def test_phases_of_a_recovery_lie_between_its_events():
    found = summarise(KILLED, KILLED_STEPS)

    assert found["recoveries"] == [
        {
            "cause": "failure",
            "lost_steps": 2,
            "source": "checkpoint",
            "detect_s": pytest.approx(0.2),
            "rendezvous_s": pytest.approx(0.3),
            "down_s": 0.0,
            "restore_s": pytest.approx(0.5),
            "first_step_s": pytest.approx(1.0),
            "total_s": pytest.approx(2.0),
            "tries": 1,
            "generation": 2,
            "step": 9,
            "ended_s": 112.0,
            "why": "rank 1 was killed by SIGKILL",
            "line": "back at step 9 after 2.00 s: rank 1 was killed by SIGKILL, 2 steps lost",
        }
    ]
    assert found["lost_steps"] == 2
    assert found["checkpoints"] == {"committed": 1, "failed": 1}
    assert (found["finished"], found["steps"], found["epochs"], found["final_digest"]) == (
        False,
        10,
        2,
        None,
    )


def test_a_generation_reports_its_steps_including_lost_ones():
    first, second = summarise(KILLED, KILLED_STEPS)["generations"]

    assert first == {
        "generation": 1,
        "world_size": 2,
        "nodes": ["n1", "n2"],
        "first_step": 1,
        "last_step": 8,
        "cause": "start",
    }
    assert (second["world_size"], second["first_step"], second["last_step"]) == (1, 7, 10)


def test_a_step_that_only_survivors_have_finished_is_none_of_its_generation():
    """Rank 0 dies before it writes the line of step 9, which n2 has finished. So the run is back at
    step 9, having lost two: 7 and 8. The same where the next generation dies before its restore.
    """
    survivor = logged("generation_ended", 110.2, node="n2", cause="node lost", step=9)
    events = [*KILLED[:5], survivor, *KILLED[6:]]
    first, second = summarise(events, KILLED_STEPS)["generations"]
    assert (first["last_step"], second["first_step"]) == (8, 7)

    dies = [
        started(110.25, 2, "node lost"),
        logged("generation_ended", 110.3, 2, node="n2", cause="x", step=0),
    ]
    later = [logged(each.event.name, each.time, 3, **each.event.fields()) for each in KILLED[6:]]
    lines = [step(n, 101.0 + n, 1 if n < 7 else 3) for n in range(1, 11)]
    found = summarise([*KILLED[:5], survivor, *dies, *later], lines)["generations"]
    assert [each["last_step"] for each in found] == [8, None, 10]
    assert summarise([*KILLED[:5], survivor], KILLED_STEPS[:6])["generations"][0]["last_step"] == 9


def test_goodput_is_the_share_of_time_in_steps_that_count():
    """Ten seconds of steps that count, from the first generation at 100 to the last step at 115."""
    assert summarise(KILLED, KILLED_STEPS)["goodput"] == pytest.approx(10 / 15)


def resumed(gap_s, *stop):
    """Six steps, an end, and a resume `gap_s` later."""
    begin = 107.0 + gap_s
    events = [
        started(100.0, 1, "start"),
        *stop,
        started(begin, 2, "resume"),
        logged("restored", begin + 1, 2, step=6, source="checkpoint", lost_steps=0, seconds=0.1),
        logged("first_step", begin + 2, 2, step=7),
    ]
    return summarise(events, [step(n, 100.0 + n, 1) for n in range(1, 7)] + [step(7, begin + 2, 2)])


def test_the_time_between_a_planned_stop_and_its_resume_does_not_count():
    stop = [
        logged("drain_requested", 106.5, reason="SIGTERM"),
        logged("run_interrupted", 106.9, node="n1", step=6),
        logged("run_interrupted", 107.0, node="n2", step=6),
    ]
    short, long = resumed(1.0, *stop), resumed(36000.0, *stop)

    assert short["goodput"] == long["goodput"] == pytest.approx(7 / 9)
    assert long["recoveries"][0]["total_s"] == pytest.approx(2.0)
    assert long["recoveries"][0]["detect_s"] is None


def test_the_time_after_a_crash_of_all_nodes_counts():
    """A power cut: there is no run_interrupted event. What no event tells is null, not zero."""
    found = resumed(93.0)

    assert found["goodput"] == pytest.approx(7 / 102)
    recovery = found["recoveries"][0]
    assert (recovery["detect_s"], recovery["rendezvous_s"]) == (None, None)
    assert (recovery["down_s"], recovery["total_s"]) == (found["badput_s"]["down"], 96.0)


def test_a_night_without_a_node_is_no_rendezvous():
    """n2 is lost, and n1 waits for it in vain. The command is given again 8 hours later."""
    found = resumed(
        28_832.0,
        logged("generation_ended", 107.5, node="n1", cause="the generation ended: node lost", step=6),
        logged("run_interrupted", 132.0, node="n1", step=6, reason="n2 is away", gave_up=True),
    )
    recovery, down_s = found["recoveries"][0], found["badput_s"]["down"]

    assert (recovery["rendezvous_s"], recovery["down_s"]) == (24.5, 28_807.0)
    assert down_s == recovery["down_s"]
    assert recovery["total_s"] == pytest.approx(28_835.0)


def test_a_node_that_left_earlier_does_not_make_a_crash_a_planned_stop():
    """n2 leaves. It writes its last event when n1, in the next generation, has committed its state.
    Then n1 loses power.
    """
    events = [
        started(100.0, 1, "start"),
        logged("drain_requested", 103.0, 1, "n2", reason="SIGTERM"),
        logged("generation_ended", 103.5, 1, cause="node left", step=3),
        started(104.0, 2, "node left", world_size=1),
        logged("run_interrupted", 105.0, 1, "n2", step=3),
        started(200.0, 3, "resume", world_size=1),
        logged("restored", 201.0, 3, step=3, source="checkpoint", lost_steps=3, seconds=0.1),
        logged("first_step", 204.0, 3, step=7),
    ]
    lines = [step(n, 100.0 + n, 1) for n in range(1, 4)] + [step(n, 197.0 + n, 3) for n in range(4, 8)]

    assert summarise(events, lines)["goodput"] == pytest.approx(7 / 104)


def test_the_seconds_of_a_recovery_stay_when_its_last_steps_are_lost_later():
    """A node fell silent after step 6. A later fall-back loses steps 4 to 9 and their lines."""
    events = [
        started(100.0, 1, "start"),
        logged("generation_ended", 109.0, 1, cause="node lost", step=6),
        started(109.5, 2, "node lost", world_size=1),
        logged("restored", 110.0, 2, step=6, source="snapshot", lost_steps=0, seconds=0.1, last_step_s=106.0),
        logged("first_step", 111.0, 2, step=7),
    ]
    later = [
        started(200.0, 3, "resume", world_size=1),
        logged("restored", 201.0, 3, step=3, source="checkpoint", lost_steps=6, seconds=0.1),
        logged("first_step", 208.0, 3, step=10),
    ]
    lines = [step(n, 100.0 + n, 1) for n in range(1, 7)]
    first = summarise(events, [*lines, step(7, 111.0, 2)])["recoveries"][0]
    found = summarise([*events, *later], [*lines[:3], step(4, 202.0, 3)])["recoveries"][0]

    assert first == found
    assert (first["detect_s"], first["total_s"]) == (3.0, 5.0)


def test_the_steps_of_a_generation_are_those_that_it_trained_also_where_its_agents_left_no_event():
    """Both agents were killed at step 9; the newest checkpoint was that of step 6."""
    events = [
        started(100.0, 1, "start"),
        logged("restored", 100.5, 1, step=0, source="none", lost_steps=0, seconds=0.1),
        started(120.0, 2, "resume"),
        logged("restored", 121.0, 2, step=6, source="checkpoint", lost_steps=3, seconds=0.1),
    ]
    lines = [step(n, 100.0 + n, 1) for n in range(1, 7)] + [step(7, 122.0, 2)]
    first, second = summarise(events, lines)["generations"]

    assert (first["first_step"], first["last_step"]) == (1, 9)
    assert (second["first_step"], second["last_step"]) == (7, 7)


@pytest.mark.parametrize(("steps", "epochs"), [(20, 2), (24, 3), (16, 2), (7, 0)])
def test_an_epoch_that_is_not_whole_is_not_complete(steps, epochs):
    sizes = {"seed": 0, "global_batch": 8, "shards": 8, "steps_per_epoch": 8}
    begun = logged("run_started", 100.1, steps=20, epochs=3, **sizes)
    assert summarise([started(100.0, 1, "start"), begun], [step(steps, 101.0, 1)])["epochs"] == epochs


def test_an_injected_fault_that_the_group_survived_is_not_the_cause_of_a_later_end():
    """A slow disk is injected at step 1; the kill comes eight steps later without an injection."""
    moved = logged("fault_injected", 102.5, fault="slow disk", step=2)
    events = [moved if isinstance(e.event, FaultInjected) else e for e in KILLED]

    recovery = summarise(sorted(events, key=by_time), KILLED_STEPS)["recoveries"][0]

    assert recovery["total_s"] == pytest.approx(1.9)


def test_the_fault_of_a_silent_node_is_dated_to_the_last_step_before():
    """The other agents gave the node up first, and killed their workers afterwards."""
    events = [
        replace(e, time=110.3) if isinstance(e.event, WorkerExited) else e
        for e in KILLED
        if not isinstance(e.event, FaultInjected)
    ]
    events = sorted(events, key=by_time)

    recovery = summarise(events, KILLED_STEPS)["recoveries"][0]

    assert recovery["detect_s"] == pytest.approx(110.2 - 107.0)
    assert recovery["total_s"] == pytest.approx(112.0 - 107.0)


def test_the_fault_of_a_hang_is_dated_to_the_last_progress():
    """The agent reports the hang after three seconds without progress."""
    events = [e for e in KILLED if not isinstance(e.event, FaultInjected)]
    hang = logged("hang_detected", 110.05, rank=1, place="step", silence_s=3.0, limit_s=3.0, reason="r")
    events = sorted([*events, hang], key=by_time)

    recovery = summarise(events, KILLED_STEPS)["recoveries"][0]

    assert recovery["detect_s"] == pytest.approx(110.2 - 107.05)


def test_a_generation_that_died_before_its_first_step_has_no_total():
    events = [
        *KILLED[:8],
        logged("generation_ended", 110.7, 2, cause="failure", step=6),
        started(110.9, 3, "failure"),
    ]

    first, _ = summarise(events, KILLED_STEPS[:6])["recoveries"]

    assert (first["total_s"], first["source"], first["restore_s"]) == (None, None, None)


def test_a_finished_run_reports_what_its_last_event_holds():
    end = logged("run_finished", 120.0, 2, steps=20, epochs=4, digest="abc")

    found = summarise([*KILLED, end], KILLED_STEPS)

    assert (found["finished"], found["steps"], found["epochs"], found["final_digest"]) == (
        True,
        20,
        4,
        "abc",
    )


def test_a_run_that_failed_says_why_until_it_goes_on():
    """A resume begins a generation of its own, and its end is the one that counts."""
    end = logged("run_failed", 120.0, 2, exit_code=1, reason="rank 0 ended with exit code 1 (no data)")
    assert summarise([*KILLED, end], KILLED_STEPS)["failed"] == {
        "exit_code": 1,
        "reason": "rank 0 ended with exit code 1 (no data)",
    }
    assert summarise([*KILLED, end, started(121.0, 3, "resume")], KILLED_STEPS)["failed"] is None


def test_step_times_are_the_median_and_the_slowest_of_a_hundred():
    metrics = [step(n, 100.0 + n, 1, seconds=n / 100) for n in range(1, 101)]

    assert summarise([], metrics)["step_time_s"] == {"median": pytest.approx(0.505), "p99": 0.99}


def test_audits_are_counted_by_the_steps_that_count_and_by_their_failures():
    """A step that was lost and audited again has one line in the metrics, so it counts once. A
    failed audit leaves an event, and the step has no line.
    """
    lines = [replace(line, audited=True if line.step % 3 == 0 else None) for line in KILLED_STEPS]
    failure = logged("audit_failed", 109.0, step=9, shard=5, ranks=[0, 1])
    assert summarise([*KILLED, failure], lines)["audits"] == {"done": 3, "failed": 1}


def test_the_report_of_a_run_without_events_has_every_key():
    assert summarise([], []) == {
        "finished": False,
        "stopped": None,
        "failed": None,
        "steps": 0,
        "epochs": 0,
        "final_digest": None,
        "lost_steps": 0,
        "goodput": None,
        "badput_s": {},
        "snapshots": None,
        "step_time_s": {"median": None, "p99": None},
        "checkpoints": {"committed": 0, "failed": 0},
        "audits": {"done": 0, "failed": 0},
        "rehearsals": {"count": 0, "alike": 0, "seconds": 0},
        "overlaps": {"count": 0, "alike": 0, "seconds": 0},
        "not_restored": {},
        "accepted": [],
        "generations": [],
        "recoveries": [],
        "slow_ranks": [],
        "shards_by_rank": [],
        "lineage": [],
        "divergences": [],
        "replays": [],
        "edits": [],
        "logged_by_rank": [],
        "scheduled": [],
        "unreadable_lines": 0,
        "plain": None,
    }


def test_a_run_that_went_on_after_its_last_step_says_what_its_last_process_lacked():
    """Code after the loop may save what the last forward left in an attribute."""
    assert "it had no step to train" in told_at_the_end(KILLED, 6)
    assert told_at_the_end(KILLED, 10) == ""


def test_edits_of_a_recipe_are_listed_with_the_step_they_came_after():
    said = logged("recipe_edited", 3.0, step=4)
    found = viewed([*KILLED, said], KILLED_STEPS)
    text = io.StringIO()
    Console(file=text, width=120).print(report_tables("run", found))
    assert "after step 4: another text of the recipe" in text.getvalue()


def test_a_step_that_came_out_otherwise_when_it_was_done_again_is_told():
    """Once the run ended there, and once it went on, since the recipe was edited."""
    values = {"step": 9, "restored": 6, "loss_before": 0.5, "loss_now": None}
    ended = logged("replay_differed", 112.5, 2, excuse="", **values)
    excused = logged("replay_differed", 113.5, 2, excuse="the recipe was edited in between", **values)

    assert summarise([*KILLED, ended], KILLED_STEPS)["replays"] == [values | {"excuse": ""}]
    assert told_at_the_end([*KILLED, ended], 10).startswith(
        "; step 9 gave another result when it was done again"
    )
    console = Console(width=300, file=io.StringIO())
    console.print(report_tables("run", viewed([*KILLED, ended, excused], KILLED_STEPS)))
    words = "step 9, from the state of step 6: loss 0.5 then, none when it was done again; "
    assert words + "the run ended there" in console.file.getvalue()
    assert words + "the run went on, since the recipe was edited in between" in console.file.getvalue()


NAMES = (
    "fault_injected",
    "worker_exited",
    "generation_ended",
    "drain_requested",
    "run_interrupted",
    "restored",
    "first_step",
)
CAUSES = ("resume", "failure", "node lost", "node joined", "node left")


@st.composite
def histories(draw):
    """Events in any order, because clocks disagree; only generations start in their order."""
    times = sorted(draw(st.lists(st.floats(0, 100), min_size=1, max_size=4)))
    events = [
        started(t, g, "start" if g == 1 else draw(st.sampled_from(CAUSES)))
        for g, t in enumerate(times, start=1)
    ]
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=14)):
        fields = {"lost_steps": draw(st.integers(0, 5))} if name == "restored" else {}
        events.append(logged(name, draw(st.floats(0, 100)), draw(st.integers(1, len(times))), **fields))
    metrics = [
        step(n, draw(st.floats(0, 100)), draw(st.integers(1, len(times))), seconds=draw(st.floats(0, 50)))
        for n in range(1, draw(st.integers(0, 5)) + 1)
    ]
    return sorted(events, key=by_time), metrics


@given(histories())
def test_for_any_history_no_duration_is_negative_and_phases_add_up(history):
    """Clocks that disagree, missing events, steps that claim more time than passed."""
    found = summarise(*history)

    assert len(found["recoveries"]) == len(found["generations"]) - 1
    assert found["lost_steps"] == sum(e.event.lost_steps for e in history[0] if isinstance(e.event, Restored))
    assert found["goodput"] is None or 0 <= found["goodput"] <= 1
    assert all(seconds > 0 for seconds in found["badput_s"].values())
    down_s = sum(recovery["down_s"] for recovery in found["recoveries"])
    assert down_s <= found["badput_s"].get("down", 0.0) + 1e-9
    for recovery in found["recoveries"]:
        names = ("detect_s", "rendezvous_s", "down_s", "restore_s", "first_step_s")
        phases = [recovery[key] for key in names]
        assert all(phase is None or phase >= 0 for phase in phases)
        assert recovery["lost_steps"] >= 0
        if recovery["total_s"] is not None:
            assert recovery["total_s"] >= sum(phase or 0.0 for phase in phases) - 1e-9
            if None not in phases and recovery["tries"] == 1:
                assert recovery["total_s"] == pytest.approx(sum(phases))


def test_a_lineage_is_reported_oldest_first():
    """Of three runs. The folders of the first two may be gone: the third one's run.json has all."""
    first, second = summarise([], [], PARENT)["lineage"]
    assert first == asdict(PARENT.ancestors[0])
    assert second == {"run_id": PARENT.run_id, "step": PARENT.step, "digest": PARENT.digest}


def test_differences_between_ranks_are_listed_with_the_node_that_was_wrong_or_the_recipe():
    """Step 40 was judged, and either of two nodes was wrong; the run ended over step 90, which is
    the recipe's; step 95 of another attempt was never done again.
    """
    found = summarise(
        [
            started(100.0, 1, "start"),
            logged("divergence_detected", 101.0, step=40, entry="m.w", ranks=[[0], [1]]),
            logged("divergence_judged", 102.0, 2, step=40, entry="m.w", nodes=["a", "b"], verdict="machine"),
            logged("divergence_detected", 103.0, 3, step=90, entry="m.v", ranks=[[0], [1]]),
            logged("divergence_judged", 103.0, 3, step=90, entry="m.v", nodes=[], verdict="recipe"),
            logged("divergence_detected", 104.0, 4, step=95, entry="", ranks=[[0], [1]]),
        ],
        [],
    )
    assert found["divergences"] == [
        {"step": 40, "node": "a", "entry": "m.w", "verdict": "machine"},
        {"step": 40, "node": "b", "entry": "m.w", "verdict": "machine"},
        {"step": 90, "node": None, "entry": "m.v", "verdict": "recipe"},
        {"step": 95, "node": None, "entry": "", "verdict": None},
    ]


def test_the_jobs_that_started_nodes_are_reported_with_their_restarts():
    """A task of an array, and once more after it was requeued; a job outside an array."""
    task = {"scheduler": "slurm", "job": "14", "array_job": "12", "array_task": 3, "host": "gpu-7"}
    plain = {"scheduler": "slurm", "job": "15", "array_job": None, "array_task": None, "host": ""}
    events = [
        logged("node_scheduled", 99.0, 0, **task, restarts=0),
        logged("node_scheduled", 111.0, 0, "n2", **task, restarts=1),
        logged("node_scheduled", 112.0, 0, "n3", **plain, restarts=None),
        *KILLED,
    ]
    found = viewed(events, KILLED_STEPS)

    assert asdict(found)["scheduled"] == [
        {"node": "n1", **task, "restarts": 0},
        {"node": "n2", **task, "restarts": 1},
        {"node": "n3", **plain, "restarts": None},
    ]
    assert found.time == viewed(KILLED, KILLED_STEPS).time
    console = Console(width=300, file=io.StringIO())
    console.print(report_tables("run", found))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["n2", "12_3", "1", "gpu-7"] in rows
    assert ["n3", "15", "-"] in rows
