"""What a reader asks in the morning: where the run stands, what went wrong, and what it cost.

Every figure is that of the whole run, whatever part of it is drawn.
"""

from dataclasses import replace

import drawn_runs
import pytest
from drawn_pictures import drawn
from logged import logged

from elastic.report.picture import faults, headline, recoveries
from elastic.report.picture.limits import Limits
from elastic.report.prometheus import CAUSES

BEGAN = drawn_runs.BEGAN
LIMITS = Limits()


def plain(text):
    """The narrow space between a number and its unit does not matter to what is said."""
    return text.replace("\u202f", " ").replace("\u00a0", " ")


def lines_of(first, last, begin, generation=1, **values):
    """Steps of a second each, from `begin` on."""
    return [
        replace(
            drawn_runs.line(step, BEGAN + begin + 1 + step - first, generation),
            seconds=1.0,
            **values,
        )
        for step in range(first, last + 1)
    ]


# More generations than are drawn.


def of_many(count, slow):
    """One node; each generation of 12 s ends by a signal. `slow` takes 500 s more to begin, and has
    no checkpoint.
    """
    events, time = [], BEGAN
    for generation in range(1, count + 1):
        events.append(drawn_runs.started(time, generation, "failure" if generation > 1 else "start", ["a"]))
        time += 505 if generation == slow else 5
        events += [
            logged("restored", time, generation, "a", step=generation),
            logged("first_step", time + 1, generation, "a", step=generation),
        ]
        if generation != slow:
            events.append(logged("checkpoint_committed", time + 2, generation, "a", step=generation))
        time += 6
        events += [
            logged("worker_exited", time, generation, "a", rank=0, code=None, signal="SIGKILL"),
            logged("generation_ended", time + 0.5, generation, "a", step=generation),
        ]
        time += 1
    events.append(logged("run_finished", time, count, "a", steps=count))
    return events


def test_figures_are_those_of_all_generations_also_of_the_ones_that_are_not_drawn():
    shown = drawn(of_many(1000, slow=500), [])

    assert 500 not in {each.number for each in shown.timeline.generations}
    assert (shown.timeline.num_generations, shown.timeline.num_machines) == (1000, 1)
    assert shown.recoveries.number == 999
    assert shown.recoveries.longest_s == pytest.approx(507)
    assert shown.recoveries.median_s == pytest.approx(7)
    assert len(shown.recoveries.longest) == recoveries.MOST_RECOVERIES
    longest = shown.recoveries.longest[0]
    assert (longest.generation, longest.step, longest.why) == (500, 500, "rank 0 was killed by SIGKILL")
    # From the commit of generation 499 to that of generation 501.
    assert shown.checkpoints.longest_age == pytest.approx(500 + 2 * 12)
    assert max(value for value in shown.checkpoints.age.values if value is not None) == pytest.approx(524)


def test_generations_that_are_not_drawn_are_no_pause():
    shown = drawn(of_many(1000, slow=500), []).timeline

    assert {each.gap for each in shown.generations} == {"", "left out"}
    (at,) = [index for index, each in enumerate(shown.generations) if each.gap]
    assert (shown.generations[at].number, shown.generations[at + 1].number) == (300, 701)
    assert shown.lanes[0].spans == [(0, 299), (300, 599)]


# A run that is alive.


def test_a_run_that_stands_still_is_drawn_until_now_and_its_headline_says_since_when():
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["alive"]),
        logged("run_started", BEGAN, 1, "alive", steps=3000),
        logged("checkpoint_committed", BEGAN + 50, 1, "alive", step=50),
    ]
    shown = drawn(events, lines_of(1, 103, 0.0), now_s=BEGAN + 139)

    assert plain(shown.headline) == "Running at step 103 of 3000 after 2 min 19 s; no step for 36 s."
    assert "36 s went to the wait since the last step" in plain(shown.went_to)
    assert (shown.timeline.ends, shown.timeline.generations[-1].ends) == (139, 139)
    assert (shown.checkpoints.age.at[-1], shown.checkpoints.age.values[-1]) == (139, 89)
    assert shown.last_sign_s is None


@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_a_run_whose_steps_come_as_always_is_not_said_to_stand_still(seconds):
    events = [drawn_runs.started(BEGAN, 1, "start", ["alive"])]
    lines = [replace(each, seconds=seconds) for each in lines_of(1, 100, 0.0)]

    shown = drawn(events, lines, now_s=BEGAN + 100 + 9.5 * seconds)
    assert "no step" not in shown.headline


def test_a_run_that_was_resumed_a_moment_ago_is_not_said_to_stand_still():
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["alive"]),
        logged("run_interrupted", BEGAN + 11, 1, "alive", step=10),
        drawn_runs.started(BEGAN + 9000, 2, "resume", ["alive2"]),
    ]
    assert "no step" not in drawn(events, lines_of(1, 10, 0.0), now_s=BEGAN + 9005).headline
    assert plain(drawn(events, lines_of(1, 10, 0.0), now_s=BEGAN + 9020).headline).endswith(
        "; no step for 20 s."
    )


# No node left.


def down(last):
    """Two nodes train for 100 s, and hours later the run is resumed. last: the end of the first."""
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a", "b"]),
        *last,
        drawn_runs.started(BEGAN + 28_900, 2, "resume", ["a", "b"]),
        logged("restored", BEGAN + 28_901, 2, "a", step=100),
        logged("first_step", BEGAN + 28_905, 2, "a", step=101),
        logged("run_finished", BEGAN + 29_000, 2, "a", steps=150),
    ]
    return drawn(events, [*lines_of(1, 100, 0.0), *lines_of(101, 150, 28_904.0, 2)])


def test_no_machine_is_in_while_all_nodes_are_dead():
    shown = down([])

    before, after = shown.timeline.generations
    assert (before.ends, before.gap, after.begins) == (100.0, "down", 28_900.0)
    assert [(mark.at, mark.kind, mark.text) for mark in shown.timeline.marks[:1]] == [
        (100.0, "fault", "no node answered")
    ]
    assert shown.checkpoints.longest_age == 200.0
    assert plain(shown.went_to).endswith("8 h went by with no group there.")
    assert shown.causes["down"] == 1
    (fault,) = shown.faults.most_expensive
    assert (fault.what, fault.at, fault.cost_s) == ("no node answered", 100.0, 28_804.0)
    assert shown.faults.number == 1


def test_the_end_of_all_nodes_is_the_longest_recovery_although_its_phases_are_unknown():
    events = [
        *[each for each in of_many(60, slow=50) if each.event.name != "run_finished"],
        drawn_runs.started(BEGAN + 30_000, 61, "resume", ["a"]),
        logged("restored", BEGAN + 30_001, 61, "a", step=60),
        logged("first_step", BEGAN + 30_002, 61, "a", step=61),
        drawn_runs.started(BEGAN + 60_000, 62, "resume", ["a"]),
        logged("restored", BEGAN + 60_000.5, 62, "a", step=61),
        logged("first_step", BEGAN + 60_001, 62, "a", step=62),
        logged("run_finished", BEGAN + 60_002, 62, "a", steps=62),
    ]
    found = drawn(events, lines_of(61, 61, 30_001.0, 61)).recoveries

    longest = found.longest[0]
    assert (longest.generation, longest.total_s) == (62, found.longest_s)
    assert longest.detect_s is None


def test_nodes_were_there_until_the_last_step_although_it_was_lost():
    """All nodes die 40 s after the newest checkpoint; the lines of these steps are gone."""
    lost = {"step": 100, "lost_steps": 40, "last_step_s": BEGAN + 140.0}
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a"]),
        drawn_runs.started(BEGAN + 1000, 2, "resume", ["a"]),
        logged("restored", BEGAN + 1001, 2, "a", **lost),
        logged("run_finished", BEGAN + 1052, 2, "a", steps=150),
    ]
    shown = drawn(events, [*lines_of(1, 100, 0.0), *lines_of(101, 150, 1002.0, 2)])

    assert (shown.timeline.generations[0].ends, shown.badput_s["down"]) == (140.0, 860.0)
    assert [mark.at for mark in shown.timeline.marks] == [140.0, 1052.0]
    (fault,) = shown.faults.most_expensive
    assert (fault.what, fault.at, fault.cost_s) == ("no node answered", 140.0, 902.0)


def test_a_group_that_gave_up_is_a_fault_and_no_planned_stop():
    left = logged("run_interrupted", BEGAN + 130, 1, "a", step=90, reason="b is away", gave_up=True)
    shown = down([left])

    assert shown.timeline.generations[0].ends == 130.0
    assert shown.timeline.generations[0].gap == "down"
    assert [mark.kind for mark in shown.timeline.marks] == ["fault", "end"]
    assert shown.faults.most_expensive[0].what == "the group gave up: b is away"
    assert shown.paused_s == 0


LOSS = logged("generation_ended", BEGAN + 105, 1, "a", cause="the generation ended: node lost", step=90)


def test_a_node_for_which_the_others_waited_in_vain_is_named():
    gave_up = logged("run_interrupted", BEGAN + 130, 1, "a", step=90, reason="1 of 2 is here", gave_up=True)
    events = [drawn_runs.started(BEGAN, 1, "start", ["a", "b"]), LOSS, gave_up]
    resumed = [
        drawn_runs.started(BEGAN + 1000, 2, "resume", ["a", "b"]),
        logged("run_finished", BEGAN + 1052, 2, "a", steps=150),
    ]
    lines = lines_of(1, 100, 0.0)
    for shown in (drawn(events, lines), drawn([*events, *resumed], [*lines, *lines_of(101, 150, 1002.0, 2)])):
        (fault,) = shown.faults.most_expensive
        assert (fault.machine, fault.at) == ("b", 105.0)
        assert fault.what == "node b lost; the group gave up: 1 of 2 is here"
        assert "node lost: b" in [mark.text for mark in shown.timeline.marks]
        assert shown.causes["node lost"] == 1  # beside its time, although no generation has that cause


def test_while_the_others_wait_a_fault_is_shown_and_no_node_is_blamed():
    """The agent of another one may be about to write."""
    events = [drawn_runs.started(BEGAN, 1, "start", ["a", "b"]), LOSS]
    shown = drawn(events, lines_of(1, 100, 0.0), now_s=BEGAN + 120)
    (fault,) = shown.faults.most_expensive
    assert (fault.what, fault.machine, fault.cost_s) == ("a node was lost, and the others wait", "", None)
    assert shown.badput_s["node lost"] == 20.0


def test_a_planned_stop_is_said_beside_the_time_of_the_run_and_is_no_fault():
    shown = down([logged("run_interrupted", BEGAN + 101, 1, node, step=100) for node in ("a", "b")])

    assert shown.timeline.generations[0].gap == "stop"
    assert shown.paused_s == pytest.approx(28_799)
    assert "down" not in shown.badput_s
    assert plain(shown.went_to).endswith(
        "Beside that time, it lay still for 8 h after it was stopped as asked."
    )
    assert shown.faults.number == 0


def test_a_run_that_ended_without_a_word_says_when_it_was_seen_last():
    shown = drawn([drawn_runs.started(BEGAN, 1, "start", ["a"])], lines_of(1, 60, 0.0))

    assert shown.state == "interrupted"
    assert shown.last_sign_s == BEGAN + 60
    assert shown.timeline.marks[-1].text == "no node answered"
    assert shown.faults.most_expensive[0].what == "no node answered"


# What went wrong.


def test_faults_are_told_with_their_costs_and_a_node_that_joins_is_none():
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a", "b"]),
        logged("worker_failed", BEGAN + 11, 1, "b", rank=1, message="ValueError: no\nmore"),
        drawn_runs.started(BEGAN + 20, 2, "failure", ["a", "b"]),
        logged("checkpoint_failed", BEGAN + 25, 2, "a", step=15, reason="disk full"),
        logged("generation_ended", BEGAN + 60, 2, "a", step=20),
        drawn_runs.started(BEGAN + 70, 3, "node lost", ["a"]),
        drawn_runs.started(BEGAN + 90, 4, "node joined", ["a", "c"]),
        logged("run_finished", BEGAN + 110, 4, "a", steps=40),
    ]
    lines = [
        *lines_of(1, 10, 0.0),
        *lines_of(11, 20, 23.0, 2),
        *lines_of(21, 30, 73.0, 3),
        *lines_of(31, 40, 95.0, 4),
    ]
    found = drawn(events, lines).faults

    assert found.number == 2
    assert [(each.at, each.machine, each.what, each.cost_s) for each in found.most_expensive] == [
        (60.0, "b", "node b lost", 40.0),
        (11.0, "b", "rank 1 failed (ValueError: no)", 13.0),
        (25.0, "a", "save of step 15 failed: disk full", None),
    ]


def test_the_costs_of_all_faults_are_the_time_that_was_lost_to_their_causes():
    """Also where a generation trained no step, and is a part of the way to the next one."""
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a"]),
        drawn_runs.started(BEGAN + 20, 2, "failure", ["a"]),
        drawn_runs.started(BEGAN + 50, 3, "failure", ["a"]),
        logged("run_finished", BEGAN + 65, 3, "a", steps=20),
    ]
    shown = drawn(events, [*lines_of(1, 10, 0.0), *lines_of(11, 20, 55.0, 3)])
    assert sum(each.cost_s for each in shown.faults.most_expensive) == shown.badput_s["failure"] == 45.0


def test_of_very_many_faults_the_most_expensive_are_told_and_the_others_counted():
    found = drawn(of_many(1000, slow=500), []).faults
    assert (found.number, len(found.most_expensive)) == (999, faults.MOST_FAULTS)
    assert found.left_out == 999 - faults.MOST_FAULTS


# Checkpoints.


def test_the_newest_checkpoint_is_the_last_one_also_where_a_clock_was_set_back():
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a"]),
        logged("checkpoint_committed", BEGAN + 5000, 1, "a", step=10),
        logged("checkpoint_committed", BEGAN + 20, 1, "a", step=20),
    ]
    assert drawn(events, []).checkpoints.newest_step == 20


def test_of_very_many_checkpoints_the_ticks_lie_evenly_and_the_others_are_counted():
    commits = [logged("checkpoint_committed", BEGAN + at, 1, "a", step=at) for at in range(1, 5001)]
    found = drawn([drawn_runs.started(BEGAN, 1, "start", ["a"]), *commits], []).checkpoints

    assert (found.commits[0], found.commits[-1], len(found.commits)) == (1, 5000, LIMITS.commits)
    assert found.commits_left_out == 5000 - LIMITS.commits
    between = [after - at for at, after in zip(found.commits, found.commits[1:], strict=False)]
    assert max(between) - min(between) <= 1


def test_a_run_without_a_checkpoint_has_no_tick():
    shown = drawn([drawn_runs.started(BEGAN + 1, 1, "start", ["a"])], [], now_s=BEGAN + 90)
    assert shown.checkpoints.commits == []


# Slow ranks.


def test_the_second_sentence_says_what_a_slow_rank_cost_within_the_steps():
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a", "b"], world_size=2),
        logged("worker_started", BEGAN, 1, "b", rank=1, pid=7),
        logged("run_finished", BEGAN + 200, 1, "a", steps=200),
    ]
    lines = lines_of(1, 200, 0.0, slowest_rank=1, slowest_s=0.9, others_s=0.4)
    assert plain(drawn(events, lines).went_to) == (
        "100.0 % of the time was training. Within the steps, the others waited 1 min 40 s for rank 1 on b."
    )


def test_steps_without_a_slowest_rank_are_a_gap_and_no_fault():
    lines = lines_of(1, 30, 0.0)
    own = {"slowest_rank": 1, "slowest_s": 0.9, "others_s": 0.4}
    lines = [replace(each, **own) if 10 < each.step <= 20 else each for each in lines]
    shown = drawn([drawn_runs.started(BEGAN, 1, "start", ["a"])], lines)

    assert shown.slowest.values == [None] * 10 + [0.9] * 10 + [None] * 10
    assert (shown.slowest.at, shown.slowest.gaps) == (shown.step_time.at, 0)
    assert drawn([drawn_runs.started(BEGAN, 1, "start", ["a"])], lines[:10]).slowest is None


def test_a_clock_that_is_ahead_moves_no_end():
    """A node that left early was a day ahead."""
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a", "b"]),
        logged("worker_failed", BEGAN + 86_400, 1, "b", rank=1, message="no"),
        logged("generation_ended", BEGAN + 60, 1, "a", step=60),
        drawn_runs.started(BEGAN + 70, 2, "failure", ["a"]),
        logged("run_interrupted", BEGAN + 101, 2, "a", step=90, gave_up=True),
    ]
    shown = drawn(events, [*lines_of(1, 60, 0.0), *lines_of(61, 90, 70.0, 2)])

    assert shown.timeline.ends == 101
    assert shown.timeline.generations[-1].ends == 101
    assert shown.last_sign_s == BEGAN + 101
    assert max(mark.at for mark in shown.timeline.marks) <= 101


def test_states_that_differed_are_a_fault_of_the_machine_that_was_wrong():
    """Rank 0, on another machine, found the difference, and wrote the judgement."""
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a", "b"]),
        logged("divergence_detected", BEGAN + 60, 1, "a", step=60, entry="model", ranks=[[0], [1]]),
        logged("generation_ended", BEGAN + 60.5, 1, "a", step=60, cause="ranks differed"),
        drawn_runs.started(BEGAN + 61, 2, "ranks differed", ["a", "b"]),
        logged(
            "divergence_judged", BEGAN + 66, 2, "a", step=60, entry="model", nodes=["b"], verdict="machine"
        ),
        logged("run_finished", BEGAN + 101, 2, "a", steps=90),
    ]
    shown = drawn(events, [*lines_of(1, 50, 0.0), *lines_of(51, 90, 61.0, 2)])
    fault = shown.faults.most_expensive[0]

    assert (shown.faults.number, fault.machine, fault.cost_s) == (1, "b", pytest.approx(11.0))
    assert "11 s went to 1 difference between the ranks" in plain(shown.went_to)
    lanes = [lane.name for lane in shown.timeline.lanes]
    assert [lanes[mark.lane] for mark in shown.timeline.marks if "judged" in mark.text] == ["b"]


def test_every_cause_of_a_generation_has_words():
    assert {*CAUSES} <= {*headline._CAUSES}
