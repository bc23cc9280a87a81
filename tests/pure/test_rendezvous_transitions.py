"""The group's values and transitions, each against a dumb twin or a sentence that promises it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.rendezvous import membership, transitions
from elastic.rendezvous.failure_detector import NO_HEARTBEAT, FailureDetector
from elastic.rendezvous.group import ANY_RUN, Group, GroupDamaged, Node, RunEnd, SharedSettings, WorkerFailure
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.partition import UnreachableReport, nodes_to_exclude
from elastic.rendezvous.transitions import GroupAction, Timing

POLICY = GroupPolicy(min_nodes=1, max_nodes=4, last_call_s=2.0, timeout_s=60.0)
SETTINGS = SharedSettings(run=ANY_RUN, min_nodes=1, max_nodes=9, keep_alive_s=2.0)


def node(name, nproc=1):
    return Node(id=name, address="127.0.0.1", nproc=nproc)


def formed(*names):
    return again(Group(), *names)


def closed(group, cause=transitions.FAILURE, step=0, *, counts=True):
    return transitions.close(
        group, generation=group.generation, cause=cause, step=step, counts=counts, failure=None
    )


def rejoined(group, *names):
    for name in names:
        group = transitions.join(group, node(name))
    return group


def again(group, *names):
    """These nodes wait, and form the next generation."""
    return transitions.form(rejoined(group, *names), alive=set(names), endpoint="h:1", policy=POLICY)


def test_a_state_whose_fields_contradict_each_other_is_refused():
    """A node is listed twice; a generation is open without an endpoint."""
    group = formed("a")
    with pytest.raises(GroupDamaged, match="twice"):
        Group.parse(replace(group, members=(node("a"), node("a"))).to_json())
    with pytest.raises(GroupDamaged, match="endpoint"):
        Group.parse(replace(group, endpoint=None).to_json())


def test_a_long_traceback_keeps_its_end():
    """The last line names the error. 8 KiB are kept, without half a character."""
    failure = WorkerFailure(node="a", rank=0, message="m", traceback="é" * 9000 + "ValueError: end")
    assert failure.traceback.endswith("ValueError: end") and len(failure.traceback.encode()) <= 8192


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=12))
def test_restarts_are_the_failures_since_the_last_new_step(closings):
    """Any sequence of closed generations. The twin searches the whole history for the last one with
    a new step.
    """
    group, high, since_progress = Group(), 0, 0
    for index, (step, counts) in enumerate(closings):
        group = closed(again(group, "a"), step=step, counts=counts)
        if step > high:
            high, since_progress = step, index
    assert group.restarts == sum(counts for _, counts in closings[since_progress:])
    assert group.high_step == high


@pytest.mark.parametrize("steps_between", [0, 1])
def test_a_storm_of_preemptions_uses_up_no_restart(steps_between):
    """Each machine that goes loses its workers before its agent, which counts that as a failure;
    another one takes its place. Then the recipe fails between preemptions, which counts, and after
    a planned leave, which explains nothing.
    """
    names = ["a", "b", "c", "d"]
    group = formed(*names)
    for second in range(20):
        names = [*names[1:], f"new{second}"]
        group = transitions.evict(closed(group, step=second * steps_between), alive={*names})
        group = again(group, *names)
        assert (group.restarts, group.cause, len(group.members)) == (0, transitions.NODE_LOST, 4)
    for number in (1, 2):
        group = again(closed(group), *names)
        assert (group.restarts, group.cause) == (number, transitions.FAILURE)
        names = names[1:]
        group = again(transitions.evict(closed(group), alive={*names}), *names)
        assert (group.restarts, group.cause) == (number, transitions.NODE_LOST)
    group = again(transitions.leave(closed(group), names[0]), names[1])
    assert (group.restarts, group.cause) == (3, transitions.FAILURE)


def test_a_node_of_an_older_generation_changes_nothing():
    """A node of generation 1 wakes up in generation 2 and reports failure, completion and the end
    of the run.
    """
    second = again(closed(formed("a", "b")), "a")
    assert second.generation == 2
    late = transitions.close(second, generation=1, cause="failure", step=9, counts=True, failure=None)
    assert late == second
    assert transitions.done(second, generation=1, node_id="a") == second
    assert transitions.end(second, generation=1, run_end=RunEnd(exit_code=1, reason="zombie")) == second
    assert transitions.leave(second, "b") == second


def test_the_culprit_may_add_its_failure_after_a_victim_closed():
    """The victim closes first, without a traceback. The second close adds one and counts nothing; a
    third is ignored.
    """
    first = WorkerFailure(node="b", rank=1, message="boom", traceback="tb")
    group = closed(formed("a", "b"), step=5)
    updated = transitions.close(group, generation=1, cause="failure", step=6, counts=True, failure=first)
    again = transitions.close(
        updated, generation=1, cause="x", step=6, counts=True, failure=replace(first, message="late")
    )
    assert again == replace(group, failure=first)
    assert (group.restarts, group.high_step) == (1, 5)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 9))
def test_spares_wait_and_never_cause_a_new_generation(sizes, max_nodes, max_workers):
    """Any sizes and limits: the generation keeps within them, and to form again at once would admit
    no other node.
    """
    policy = replace(POLICY, max_nodes=max_nodes, max_workers=max_workers)
    group = Group()
    for index, nproc in enumerate(sizes):
        group = transitions.join(group, node(str(index), nproc))
    alive = {n.id for n in group.waiting}
    opened = transitions.form(group, alive=alive, endpoint="h:1", policy=policy)
    assert len(opened.members) <= max_nodes and sum(n.nproc for n in opened.members) <= max_workers
    assert membership.newcomers(opened, alive=alive, policy=policy) == ()
    if opened.open:
        assert opened.member_ids | opened.waiting_ids == alive
        assert transitions.join(opened, opened.members[0]) == opened


who = st.sampled_from("abcdef")
names = st.lists(who, unique=True, max_size=4)
said = st.builds(UnreachableReport, node=who, peers=st.lists(who, unique=True, max_size=5).map(tuple))


@given(names, st.permutations("abcdef"), st.lists(said, max_size=5), st.sets(who), st.integers(1, 4))
def test_members_reach_each_other_and_the_generation_stays_open(members, arrived, reports, alive, max_nodes):
    """Any members return, any others arrive, any reports: no report closes the new generation
    again, and a previous member is left out only because of a report.
    """
    policy = replace(POLICY, max_nodes=max_nodes)
    before = replace(Group(), members=tuple(map(node, members)), reports=tuple(reports))
    group = transitions.form(rejoined(before, *arrived), alive=alive, endpoint="h:1", policy=policy)
    if not group.open:
        assert not alive
        return
    assert transitions.close_if_partitioned(group, alive=alive, step=0) == group
    assert membership.newcomers(group, alive=alive, policy=policy) == ()
    for report in reports:
        assert report.node not in group.member_ids or not group.member_ids & (
            set(report.peers) - {report.node}
        )
    gone = nodes_to_exclude([name for name in members if name in alive], reports)
    stay = [name for name in members if name in alive and name not in gone]
    assert [n.id for n in group.members][: len(stay)] == stay[:max_nodes]


def test_a_run_that_begins_again_goes_on_counting_generations():
    """A person starts a run again that failed after two restarts; or a new one with --fresh, whose
    first node waited for another one and was killed.
    """
    group = replace(closed(formed("a")), restarts=2)
    group = transitions.end(group, generation=1, run_end=RunEnd(exit_code=1, reason="failed"))
    found = again(transitions.reopen(group), "n")
    assert (found.generation, found.cause, found.restarts, found.ended) == (2, transitions.RESUME, 0, None)
    waiting = rejoined(transitions.take_over(transitions.reset(formed("a")), SETTINGS), "b")
    found = again(transitions.take_over(waiting, SETTINGS), "c")
    assert (found.generation, found.cause) == (3, transitions.START)


def test_failures_without_a_new_step_wait_longer_each_time():
    """At once, and then 1, 2, 4 s and so on up to 30 s; a change of membership never waits."""

    def is_ready(group, waited_s):
        timing = Timing(now_s=100.0 + waited_s, closed_since_s=100.0, enough_since_s=100.0)
        found = transitions.next_action(group, node("a"), alive={"a"}, timing=timing, policy=POLICY)
        return found.action == GroupAction.FORM

    failed = rejoined(closed(formed("a")), "a")
    for restarts, pause_s in ((1, 0.0), (2, 1.0), (3, 2.0), (4, 4.0), (7, 30.0), (10**6, 30.0)):
        group = replace(failed, restarts=restarts, cause=transitions.FAILURE)
        assert transitions.restart_pause_s(group) == pause_s
        assert is_ready(group, pause_s) and (not pause_s or not is_ready(group, pause_s - 0.1))
        assert is_ready(replace(group, cause=transitions.NODE_LOST), 0.0)


def test_only_a_first_generation_waits_for_stragglers():
    """One node of at most four waits, and one is enough since a second: at the start, after a
    failure, and after all nodes left.
    """
    just_now = Timing(now_s=10.0, closed_since_s=10.0, enough_since_s=9.0)

    def action(group, timing=just_now):
        return transitions.next_action(group, node("a"), alive={"a"}, timing=timing, policy=POLICY).action

    drained = transitions.leave(formed("a"), "a")
    assert action(rejoined(Group(), "a")) == GroupAction.WAIT
    assert action(rejoined(Group(), "a"), replace(just_now, now_s=11.0)) == GroupAction.FORM
    assert action(rejoined(closed(formed("a")), "a")) == GroupAction.FORM
    assert action(rejoined(drained, "a")) == GroupAction.WAIT
    full = transitions.next_action(
        rejoined(Group(), "a"), node("a"), alive={"a"}, timing=just_now, policy=replace(POLICY, max_nodes=1)
    )
    assert full.action == GroupAction.FORM


def test_a_node_without_a_heartbeat_dies_after_the_keep_alive():
    """Its id is in the group and its counter never appears. A counter that is missing for a moment
    is no sign of life.
    """
    view = FailureDetector(keep_alive_s=1.0)
    for tick in range(6):
        view = view.observe({"b": NO_HEARTBEAT, "c": 3 if tick % 2 else NO_HEARTBEAT}, now_s=tick * 0.25)
    assert view.alive == {"c"}
    for tick in range(6, 10):
        view = view.observe({"c": 3 if tick % 2 else NO_HEARTBEAT}, now_s=tick * 0.25)
    assert view.alive == set()


def documented_actions():
    """The table of actions in the docstring of the module."""
    _, _, table = (transitions.__doc__ or "").partition("its action")
    rows = [line.split("|") for line in table.splitlines() if line.count("|") == 2]
    return {(state.strip(), who.strip()): set(acts.strip().split(", ")) for state, who, acts in rows}


def role(group, me, alive):
    """The row of the table that a node finds itself in."""
    if group.ended:
        return "ended", "is any"
    if (group.member_ids | group.waiting_ids | {report.node for report in group.reports}) - alive:
        return "not ended", "sees that another one is dead"
    waits = "waits" if me in group.waiting_ids else "has not joined"
    if not group.open:
        return "forming" if group.waiting_ids else "closed", waits
    return "open", "is a member" if me in group.member_ids else f"is no member and {waits}"


some_nodes = names.map(lambda ids: tuple(node(i) for i in ids))
some_groups = st.builds(
    lambda group, **fields: replace(group, **fields | {"open": fields["open"] and not fields["ended"]}),
    st.just(Group()),
    generation=st.integers(0, 3),
    open=st.booleans(),
    members=some_nodes,
    waiting=some_nodes,
    reports=st.lists(said, max_size=2).map(tuple),
    ended=st.sampled_from(
        [None, None, None, RunEnd(exit_code=0, reason="complete"), RunEnd(exit_code=1, reason="failed")]
    ),
)
seconds = st.floats(0.0, 100.0)
some_timings = st.builds(Timing, now_s=st.just(100.0), closed_since_s=seconds, enough_since_s=seconds)


@given(some_groups, who, st.sets(who), some_timings, st.integers(1, 3))
def test_a_node_does_what_the_documented_table_says(group, me, alive, timing, min_nodes):
    """Any group, node, set of live nodes and waiting times. Only of live nodes one is formed."""
    policy, alive = replace(POLICY, min_nodes=min_nodes), alive | {me}
    decision = transitions.next_action(group, node(me), alive=alive, timing=timing, policy=policy)
    assert decision.action.name in documented_actions()[role(group, me, alive)]
    if decision.action is GroupAction.FORM:
        assert group.member_ids | group.waiting_ids <= alive


@pytest.mark.parametrize(
    ("is_shared", "alive", "goes"), [(True, "ab", True), (True, "a", False), (False, "ab", False)]
)
def test_a_leaver_stays_a_member_until_a_live_one_has_its_state(is_shared, alive, goes):
    group = transitions.withdraw(formed("a", "b"), "a", alive=set(alive), is_shared=is_shared)
    assert not group.open
    assert ("a" not in group.member_ids) == goes
