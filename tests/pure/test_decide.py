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
from elastic.agent.hang_detector import HungWorker
from elastic.errors import (
    EXIT_AGAIN,
    EXIT_COMPLETE,
    EXIT_DIVERGED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOTHING_LOADS,
    EXIT_PEER_LOST,
    EXIT_RECIPE,
    EXIT_USAGE,
)
from elastic.observe.generations import ended_by_loss
from elastic.rendezvous.transitions import FAILURE, NODE_LOST
from elastic.system.silence import Phase

TRAINING = Observation(
    workers=2,
    exits=(),
    not_started=None,
    knows_difference=False,
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
HUNG = HungWorker(rank=5, phase=Phase.STEP, silence_s=12.0, limit_s=10.0, reason="rank 5 hangs")
OVER, LATE = {"leaving": "SIGTERM", "drain_is_over": True}, 2.0 * VICTIM_PATIENCE_KEEP_ALIVES + 0.1


def after(*codes, **rest):
    """The workers of ranks 4, 5, ... ended with these codes, in this order."""
    return {"exits": tuple(WorkerExit(rank=4 + i, code=code) for i, code in enumerate(codes))} | rest


TABLE = {
    "nothing happened": ({}, Action.CONTINUE, "training"),
    "one of two finished": (after(EXIT_COMPLETE), Action.CONTINUE, "training"),
    "one of two drained": (after(EXIT_INTERRUPTED), Action.CONTINUE, "training"),
    "a node is asked to leave before its first step": (
        {"leaving": "SIGTERM", "has_begun": False},
        Action.LEAVE,
        "before its first step",
    ),
    "the share of a drain is over": (
        OVER | {"drain_requested": True},
        Action.LEAVE,
        "the time to finish a step is over",
    ),
    "the run ended elsewhere": ({"group_ended": "complete"}, Action.STOP, "the run ended: complete"),
    "the run ended elsewhere, and a local worker died of it": (
        after(-9, group_ended="failed"),
        Action.STOP,
        "failed",
    ),
    "the group went on without this node": ({"fenced": True}, Action.REJOIN, "a newer generation"),
    "another node closed the generation": ({"closed": "node lost"}, Action.REJOIN, "node lost"),
    "another node closed the generation, and a local worker died too": (
        after(-9, closed="failure"),
        Action.REJOIN,
        "failure",
    ),
    "another node closed the generation while this one was leaving": (
        {"closed": "node left", "leaving": "SIGTERM"},
        Action.LEAVE,
        "node left",
    ),
    "a worker cannot be started": ({"not_started": "no memory"}, Action.FAIL, "no memory"),
    "a worker cannot be started, and this node leaves": (
        {"not_started": "no memory", "leaving": "SIGTERM"},
        Action.LEAVE,
        "no memory",
    ),
    "a worker was killed": (after(-9), Action.FAIL, "rank 4 ended with signal 9"),
    "a worker raised": (after(EXIT_FAILED), Action.FAIL, "rank 4 ended with exit code 1"),
    "a worker raised after others finished": (
        after(EXIT_COMPLETE, 3),
        Action.FAIL,
        "rank 5 ended with exit code 3",
    ),
    "a worker ended with exit code 0 within its loop": (
        {
            "exits": (
                WorkerExit(rank=4, code=EXIT_COMPLETE),
                WorkerExit(rank=5, code=EXIT_COMPLETE, open_step=7),
            )
        },
        Action.FAIL,
        "rank 5 ended with exit code 0 within the loop, in step 7",
    ),
    "a worker ended with exit code 0 while its state was restored, and its peer lost it": (
        {
            "exits": (
                WorkerExit(rank=4, code=EXIT_PEER_LOST, open_step=0),
                WorkerExit(rank=5, code=EXIT_COMPLETE, open_step=0),
            )
        },
        Action.FAIL,
        "rank 5 ended with exit code 0 within the loop, before its first step",
    ),
    "a worker lost a peer before the failed worker ended": (
        after(EXIT_PEER_LOST, -9),
        Action.FAIL,
        "rank 5 ended with signal 9",
    ),
    "two workers failed": (after(-9, 1), Action.FAIL, "rank 4"),
    "the recipe refused its arguments": (
        after(EXIT_USAGE),
        Action.END_RUN,
        "exit code 2, which a restart does not change",
    ),
    "no checkpoint loads": (after(EXIT_NOTHING_LOADS), Action.END_RUN, "exit code 76"),
    "the recipe was found not to be exact": (after(EXIT_RECIPE), Action.END_RUN, "exit code 72"),
    "the ranks differed": (
        after(EXIT_DIVERGED, EXIT_PEER_LOST, knows_difference=True),
        Action.REDO,
        "the ranks differed",
    ),
    "a step that was done again differed": (after(EXIT_AGAIN, EXIT_PEER_LOST), Action.AGAIN, "again differs"),
    "a worker exits as if ranks differed, and says nothing of it": (
        after(EXIT_DIVERGED),
        Action.FAIL,
        "exit code 71",
    ),
    "the ranks differed, and this node leaves": (
        after(EXIT_DIVERGED, knows_difference=True, leaving="SIGTERM"),
        Action.LEAVE,
        "SIGTERM",
    ),
    "a worker was killed, and then the ranks could not compare": (
        after(-9, EXIT_DIVERGED, knows_difference=True),
        Action.FAIL,
        "signal 9",
    ),
    "a plain script exits with the code of a recipe that is not exact": (
        after(EXIT_RECIPE, is_plain=True),
        Action.FAIL,
        "exit code 72",
    ),
    "a worker lost a peer just now": (after(EXIT_PEER_LOST), Action.CONTINUE, "training"),
    "all workers lost a peer just now": (
        after(EXIT_PEER_LOST, EXIT_PEER_LOST, first_exit_age_s=VICTIM_PATIENCE_S, keep_alive_s=0.5),
        Action.CONTINUE,
        "training",
    ),
    "a worker lost a peer, and the keep-alive is long": (
        after(EXIT_PEER_LOST, first_exit_age_s=LATE, keep_alive_s=15.0),
        Action.CONTINUE,
        "training",
    ),
    "a worker lost a peer, and a partition may still be reported": (
        after(EXIT_PEER_LOST, first_exit_age_s=3.9),
        Action.CONTINUE,
        "training",
    ),
    "a worker lost a peer, and a long keep-alive has passed": (
        after(EXIT_PEER_LOST, first_exit_age_s=33.8, keep_alive_s=15.0),
        Action.FAIL,
        "rank 4 lost a peer",
    ),
    "a worker lost a peer, and no failure was reported": (
        after(EXIT_PEER_LOST, first_exit_age_s=LATE),
        Action.FAIL,
        "rank 4 lost a peer",
    ),
    "a worker lost a peer, and this node leaves": (
        after(EXIT_PEER_LOST, first_exit_age_s=LATE, leaving="SIGTERM"),
        Action.LEAVE,
        "SIGTERM; rank 4 lost a peer",
    ),
    "all workers finished": (
        after(EXIT_COMPLETE, EXIT_COMPLETE),
        Action.REPORT_DONE,
        "all workers of this node finished",
    ),
    "all workers finished, and the group knows": (
        after(EXIT_COMPLETE, EXIT_COMPLETE, is_done=True),
        Action.CONTINUE,
        "training",
    ),
    "all workers drained for another node": (
        after(EXIT_INTERRUPTED, EXIT_INTERRUPTED),
        Action.CLOSE_AND_REJOIN,
        "the same step",
    ),
    "all workers drained because this node leaves": (
        after(EXIT_INTERRUPTED, EXIT_INTERRUPTED, leaving="SIGTERM"),
        Action.LEAVE,
        "SIGTERM",
    ),
    "this node is asked to leave": ({"leaving": "SIGTERM"}, Action.REQUEST_DRAIN, "SIGTERM"),
    "this node is asked to leave, and drains": (
        {"leaving": "SIGTERM", "drain_requested": True},
        Action.CONTINUE,
        "training",
    ),
    "all workers finished, and the backend does not answer a node that leaves": (
        after(0, 0, **OVER),
        Action.LEAVE,
        "the time to finish a step is over",
    ),
    "a worker is killed during a drain": (
        after(-9, leaving="SIGTERM"),
        Action.LEAVE,
        "signal 9 instead of draining",
    ),
    "a worker hangs": ({"hung": HUNG}, Action.DUMP_STACKS, "rank 5 hangs"),
    "a worker hangs, and its stacks are in its log": (
        {"hung": HUNG, "stacks_dumped": True},
        Action.FAIL,
        "rank 5 hangs",
    ),
    "a worker hangs, and another one died": (
        after(-9, hung=HUNG),
        Action.FAIL,
        "rank 4 ended with signal 9",
    ),
    "a worker hangs, and one that waited for it lost its peer": (
        after(EXIT_PEER_LOST, hung=HUNG, stacks_dumped=True),
        Action.FAIL,
        "rank 5 hangs",
    ),
    "a worker hangs instead of draining": (
        {"hung": HUNG, "stacks_dumped": True, "leaving": "SIGTERM", "drain_requested": True},
        Action.LEAVE,
        "SIGTERM; rank 5 hangs",
    ),
    "a worker hangs, and no time is left for stacks": (
        OVER | {"hung": HUNG},
        Action.LEAVE,
        "the time to finish a step is over",
    ),
    "a node is to be admitted": ({"newcomers": True}, Action.REQUEST_DRAIN, "waiting to join"),
    "a node is to be admitted, and the workers drain for it": (
        {"newcomers": True, "drain_requested": True},
        Action.CONTINUE,
        "training",
    ),
    "a node is to be admitted before the first step": (
        {"newcomers": True, "has_begun": False},
        Action.REQUEST_DRAIN,
        "waiting to join",
    ),
    "a worker exits as at a drain, and there was none": (
        after(EXIT_INTERRUPTED, has_drain=False),
        Action.FAIL,
        "rank 4 ended with exit code 75",
    ),
    "a plain script trains": ({"is_plain": True}, Action.CONTINUE, "training"),
    "a plain script, and a node is to be admitted": (
        {"is_plain": True, "newcomers": True},
        Action.CLOSE_AND_REJOIN,
        "a node joins",
    ),
    "a plain script has begun to finish, and a node is to be admitted": (
        after(EXIT_COMPLETE, is_plain=True, newcomers=True),
        Action.CONTINUE,
        "training",
    ),
    "a plain script, and this node is asked to leave": (
        {"is_plain": True, "leaving": "SIGTERM"},
        Action.LEAVE,
        "SIGTERM",
    ),
    "a plain script exits with the code of a victim": (
        after(EXIT_PEER_LOST, is_plain=True),
        Action.FAIL,
        "rank 4 ended with exit code 70",
    ),
    "a plain script exits with the code of a drain": (
        after(EXIT_INTERRUPTED, EXIT_INTERRUPTED, is_plain=True, has_drain=False),
        Action.FAIL,
        "rank 4 ended with exit code 75",
    ),
}


@pytest.mark.parametrize("situation", TABLE)
def test_each_situation_leads_to_its_action_with_its_reason(situation):
    """Each row changes a few things about a node that trains; the reason is what a person reads."""
    changes, action, words = TABLE[situation]
    decision = decide(replace(TRAINING, **changes))
    assert decision.action is action
    assert words in decision.reason


def test_each_rule_decides_a_situation_of_the_table():
    """A rule that no situation of the table reaches is dead or untested."""
    situations = [replace(TRAINING, **changes) for changes, _, _ in TABLE.values()]
    assert {next(rule for rule in RULES if rule.holds(seen)) for seen in situations} == set(RULES)


codes = st.sampled_from(
    [
        EXIT_COMPLETE,
        EXIT_FAILED,
        EXIT_USAGE,
        EXIT_PEER_LOST,
        EXIT_INTERRUPTED,
        EXIT_NOTHING_LOADS,
        EXIT_DIVERGED,
        EXIT_RECIPE,
        -9,
        -15,
        3,
        255,
    ]
)
words = st.none() | st.sampled_from(["SIGTERM", "failure", "node lost"])
ages = st.sampled_from([0.0, 2.9, 3.1, 29.0, 31.0, 1e6])


@st.composite
def observations(draw):
    workers = draw(st.integers(1, 4))
    return Observation(
        workers=workers,
        exits=tuple(
            WorkerExit(rank=i, code=code) for i, code in enumerate(draw(st.lists(codes, max_size=workers)))
        ),
        not_started=draw(st.sampled_from([None, "rank 4 was not started"])),
        knows_difference=draw(st.booleans()),
        is_done=draw(st.booleans()),
        first_exit_age_s=draw(ages),
        keep_alive_s=draw(ages),
        hung=draw(st.sampled_from([None, HUNG])),
        stacks_dumped=draw(st.booleans()),
        group_ended=draw(words),
        fenced=draw(st.booleans()),
        closed=draw(words),
        newcomers=draw(st.booleans()),
        leaving=draw(words),
        drain_is_over=draw(st.booleans()),
        is_plain=draw(st.booleans()),
        has_begun=draw(st.booleans()),
        drain_requested=draw(st.booleans()),
        has_drain=draw(st.booleans()),
    )


def alive(seen):
    """The run and the generation go on, so that workers and signals decide."""
    return replace(seen, group_ended=None, fenced=False, closed=None)


def failed(seen):
    return [
        e
        for e in seen.exits
        if e.code != EXIT_COMPLETE and (e.code != EXIT_INTERRUPTED or not seen.has_drain)
    ]


@given(observations())
def test_every_situation_has_a_decision_with_a_reason(seen):
    """Also in combinations that should not occur: an agent that raises here takes its node down."""
    decision = decide(seen)
    assert isinstance(decision.action, Action)
    assert decision.reason


@given(observations())
def test_a_restart_or_an_end_needs_a_worker_that_failed_or_hangs(seen):
    """Neither membership nor signals may count as failures: they would use up the restarts."""
    action = decide(seen).action
    if action is Action.END_RUN or (action is Action.FAIL and not (seen.hung and seen.stacks_dumped)):
        assert failed(seen) or seen.not_started


def have_only_lost_a_peer(seen):
    return not seen.is_plain and bool(failed(seen)) and all(e.code == EXIT_PEER_LOST for e in failed(seen))


@given(observations().filter(lambda seen: seen.leaving and not have_only_lost_a_peer(seen)))
def test_a_node_that_leaves_reports_no_failure(seen):
    """The signal may kill the workers too; a failure would cost the other nodes a restart."""
    assert decide(seen).action is not Action.FAIL


@given(observations())
def test_a_node_whose_grace_is_over_does_not_stay(seen):
    """The machine is about to be taken away: unless the workers ended, the node leaves now."""
    late = replace(alive(seen), leaving="SIGTERM", drain_is_over=True, exits=())
    assert decide(late).action is Action.LEAVE


def test_the_views_know_the_sentence_of_an_agent_whose_generation_lost_a_node():
    """They tell by its end what the others wait for."""
    decided = decide(replace(TRAINING, closed=NODE_LOST))
    ended = logged("generation_ended", 1.0, 1, "a", cause=decided.reason, step=3)
    assert ended_by_loss([ended]) is ended
    other = decide(replace(TRAINING, closed=FAILURE))
    assert ended_by_loss([logged("generation_ended", 1.0, 1, "a", cause=other.reason, step=3)]) is None
