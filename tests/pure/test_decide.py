"""What an agent does next: one row for each situation, and what holds in all of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logged import logged

from elastic.agent.decide import (
    RULES,
    VICTIM_PATIENCE_KEEP_ALIVES,
    VICTIM_PATIENCE_S,
    Action,
    Observation,
    WorkerExit,
    decide,
)
from elastic.errors import (
    EXIT_AGAIN,
    EXIT_COMPLETE,
    EXIT_DIVERGED,
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    EXIT_RECIPE,
    EXIT_USAGE,
)
from elastic.events import HangDetected
from elastic.observe.generations import ended_by_loss
from elastic.rendezvous.transitions import FAILURE, NODE_LOST

TRAINING = Observation(
    workers=2,
    exits=(),
    has_evidence=False,
    is_done=False,
    first_exit_age_s=0.0,
    keep_alive_s=2.0,
    hung=None,
    stacks_dumped=False,
    group_ended=None,
    fenced=False,
    closed=None,
    newcomers=False,
    leaving=None,
    drain_is_over=False,
    is_plain=False,
    has_begun=True,
    drain_requested=False,
    has_drain=True,
)
HUNG = HangDetected(rank=5, place="step", silence_s=12.0, limit_s=10.0, reason="rank 5 hangs")
OVER, LATE = {"leaving": "SIGTERM", "drain_is_over": True}, 2.0 * VICTIM_PATIENCE_KEEP_ALIVES + 0.1


def row(action, words, *codes, **changes):
    """A node trains, but for the changes. codes: of ranks 4, 5, ..., which ended so."""
    exits = tuple(WorkerExit(rank=4 + i, code=code) for i, code in enumerate(codes))
    return replace(TRAINING, **({"exits": exits} | changes)), action, words


def within_loop(step, code=EXIT_COMPLETE):
    """Rank 5 ended with exit code 0 within its loop, and rank 4 with another code."""
    return WorkerExit(rank=4, code=code, open_step=step if code else None), WorkerExit(
        rank=5, code=EXIT_COMPLETE, open_step=step
    )


DONE, DRAINED, LOST = EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST
TERM = "SIGTERM"
A = Action
TABLE = [
    row(A.CONTINUE, "training"),
    # The group's word counts more than what workers do.
    row(A.STOP, "the run ended: complete", -9, group_ended="complete"),
    row(A.REJOIN, "a newer generation", fenced=True),
    row(A.REJOIN, "node lost", -9, closed="node lost"),
    row(A.LEAVE, "node left", closed="node left", leaving=TERM),
    # A worker fails.
    row(A.FAIL, "rank 5 ended with exit code 3", DONE, 3),
    row(A.FAIL, "rank 5 ended with signal 9", LOST, -9),
    row(A.FAIL, "rank 5 ended with exit code 0 within the loop, in step 7", exits=within_loop(7)),
    row(A.FAIL, "rank 5 ended with exit code 0 within the loop, before", exits=within_loop(0, LOST)),
    row(A.FAIL, "rank 4 ended with exit code 75", DRAINED, has_drain=False),
    row(A.LEAVE, "SIGTERM; rank 4 ended with signal 9", -9, leaving=TERM),
    row(A.END_RUN, "exit code 2, which a restart does not change", EXIT_USAGE),
    row(A.END_RUN, "exit code 72", EXIT_RECIPE),
    # Ranks differ, and say how; or a step that was done again does.
    row(A.REDO, "the ranks differed", EXIT_DIVERGED, LOST, has_evidence=True),
    row(A.FAIL, "exit code 71", EXIT_DIVERGED),
    row(A.FAIL, "signal 9", -9, EXIT_DIVERGED, has_evidence=True),
    row(A.LEAVE, "SIGTERM", EXIT_DIVERGED, has_evidence=True, leaving=TERM),
    row(A.AGAIN, "again differs", EXIT_AGAIN, LOST, has_evidence=True),
    row(A.FAIL, "exit code 73", EXIT_AGAIN),
    # A victim waits for the report of the failure, which a partition may be the last to give.
    row(A.CONTINUE, "training", LOST, LOST, first_exit_age_s=VICTIM_PATIENCE_S, keep_alive_s=0.5),
    row(A.CONTINUE, "training", LOST, first_exit_age_s=3.9),
    row(A.CONTINUE, "training", LOST, first_exit_age_s=LATE, keep_alive_s=15.0),
    row(A.FAIL, "rank 4 lost a peer", LOST, first_exit_age_s=33.8, keep_alive_s=15.0),
    row(A.FAIL, "rank 4 lost a peer", LOST, first_exit_age_s=LATE),
    row(A.LEAVE, "SIGTERM; rank 4 lost a peer", LOST, first_exit_age_s=LATE, leaving=TERM),
    # All end well.
    row(A.REPORT_DONE, "all workers of this node finished", DONE, DONE),
    row(A.CONTINUE, "training", DONE, DONE, is_done=True),
    row(A.LEAVE, "the time to finish a step is over", DONE, DONE, **OVER),
    row(A.CLOSE_AND_REJOIN, "the same step", DRAINED, DRAINED),
    row(A.LEAVE, "SIGTERM", DRAINED, DRAINED, leaving=TERM),
    # A hang.
    row(A.DUMP_STACKS, "rank 5 hangs", hung=HUNG),
    row(A.FAIL, "rank 5 hangs", hung=HUNG, stacks_dumped=True),
    row(A.LEAVE, "SIGTERM; rank 5 hangs", hung=HUNG, stacks_dumped=True, leaving=TERM),
    row(A.LEAVE, "the time to finish a step is over", hung=HUNG, **OVER),
    # Planned ends.
    row(A.LEAVE, "SIGTERM", leaving=TERM, has_begun=False),
    row(A.REQUEST_DRAIN, "SIGTERM", leaving=TERM),
    row(A.CONTINUE, "training", leaving=TERM, drain_requested=True),
    row(A.REQUEST_DRAIN, "waiting to join", newcomers=True, has_begun=False),
    row(A.CONTINUE, "training", newcomers=True, drain_requested=True),
    # A script without the library.
    row(A.CONTINUE, "training", is_plain=True),
    row(A.LEAVE, "SIGTERM", is_plain=True, leaving=TERM),
    row(A.CLOSE_AND_REJOIN, "a node joins", is_plain=True, newcomers=True),
    row(A.CONTINUE, "training", DONE, is_plain=True, newcomers=True),
    row(A.FAIL, "exit code 70", LOST, is_plain=True),
    row(A.FAIL, "exit code 72", EXIT_RECIPE, is_plain=True),
    row(A.FAIL, "exit code 75", DRAINED, DRAINED, is_plain=True, has_drain=False),
]


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_each_situation_leads_to_its_action_with_its_reason(number):
    """The reason is what a person reads."""
    seen, action, words = TABLE[number]
    decision = decide(seen)
    assert decision.action is action
    assert words in decision.reason


def test_each_rule_decides_a_situation_of_the_table():
    """A rule that no situation of the table reaches is dead or untested."""
    assert {next(rule for rule in RULES if rule.holds(seen)) for seen, _, _ in TABLE} == set(RULES)


CODES = st.sampled_from([DONE, LOST, DRAINED, 1, EXIT_USAGE, EXIT_DIVERGED, EXIT_RECIPE, EXIT_AGAIN, -9])
WORDS = st.none() | st.sampled_from(["SIGTERM", "failure", "node lost"])
AGES = st.sampled_from([0.0, 2.9, 3.1, 29.0, 31.0, 1e6])
OBSERVATIONS = st.builds(
    Observation,
    workers=st.just(4),
    exits=st.lists(st.builds(WorkerExit, rank=st.just(4), code=CODES), max_size=4).map(tuple),
    hung=st.sampled_from([None, HUNG]),
    group_ended=WORDS,
    closed=WORDS,
    leaving=WORDS,
    first_exit_age_s=AGES,
    keep_alive_s=AGES,
)


@given(OBSERVATIONS)
def test_planned_ends_use_no_restart_and_come_in_time(seen):
    """Neither membership nor signals count as failures: a restart or the end of the run needs a
    worker that failed or hangs, and a restart that does not count what it left. A node that leaves
    reports none, since the signal may kill its workers too. One whose grace is over leaves.
    """
    ends_well = (EXIT_COMPLETE, EXIT_INTERRUPTED) if seen.has_drain else (EXIT_COMPLETE,)
    failed = [each.code for each in seen.exits if each.code not in ends_well]
    action = decide(seen).action
    if action in (Action.END_RUN, Action.AGAIN, Action.REDO) or (
        action is Action.FAIL and not (seen.hung and seen.stacks_dumped)
    ):
        assert failed
    assert action is not Action.FAIL or not seen.leaving
    assert action not in (Action.AGAIN, Action.REDO) or seen.has_evidence
    alive = replace(seen, group_ended=None, fenced=False, closed=None, exits=())
    assert decide(replace(alive, leaving="SIGTERM", drain_is_over=True)).action is Action.LEAVE


def test_the_views_know_an_agents_sentence_of_a_lost_node():
    """They tell by its end what the others wait for."""
    decided = decide(replace(TRAINING, closed=NODE_LOST))
    ended = logged("generation_ended", 1.0, 1, "a", cause=decided.reason, step=3)
    assert ended_by_loss([ended]) is ended
    other = decide(replace(TRAINING, closed=FAILURE))
    assert ended_by_loss([logged("generation_ended", 1.0, 1, "a", cause=other.reason, step=3)]) is None
