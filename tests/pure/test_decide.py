"""What an agent does next: one row for each situation, and what holds in all of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.decide import (
    VICTIM_PATIENCE_KEEP_ALIVES,
    VICTIM_PATIENCE_S,
    Action,
    Ended,
    Observation,
    decide,
)
from elastic.agent.hangs.hang_detector import Hung
from elastic.errors import (
    EXIT_COMPLETE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOTHING_LOADS,
    EXIT_PEER_LOST,
    EXIT_USAGE,
)
from elastic.system.phase import Place

TRAINING = Observation(
    workers=2,
    ended=(),
    is_done=False,
    first_end_age_s=0.0,
    keep_alive_s=2.0,
    hung=None,
    stacks_shown=False,
    group_ended=None,
    fenced=False,
    closed=None,
    newcomers=False,
    leaving=None,
    leaving_age_s=0.0,
    grace_s=30.0,
    has_begun=True,
    drain_asked=False,
    skips_drain=False,
)
HUNG = Hung(rank=5, place=Place.STEP, silence_s=12.0, limit_s=10.0, reason="rank 5 hangs")
OVER, LATE = {"leaving": "SIGTERM", "leaving_age_s": 30.1}, 2.0 * VICTIM_PATIENCE_KEEP_ALIVES + 0.1


def after(*codes, **rest):
    """The workers of ranks 4, 5, ... ended with these codes, in this order."""
    return {"ended": tuple(Ended(rank=4 + i, code=code) for i, code in enumerate(codes))} | rest


TABLE = {
    "nothing happened": ({}, Action.GO_ON, "training"),
    "one of two finished": (after(EXIT_COMPLETE), Action.GO_ON, "training"),
    "one of two drained": (after(EXIT_INTERRUPTED), Action.GO_ON, "training"),
    "we are asked to leave before a step is finished": (
        {"leaving": "SIGTERM", "has_begun": False},
        Action.LEAVE,
        "before it finished a step",
    ),
    "half of the grace is over while a drain goes on": (
        {"leaving": "SIGTERM", "leaving_age_s": 15.1, "drain_asked": True},
        Action.LEAVE,
        "half of the grace of 30 s is over",
    ),
    "not yet half of the grace": (
        {"leaving": "SIGTERM", "leaving_age_s": 14.9, "drain_asked": True},
        Action.GO_ON,
        "training",
    ),
    "the run ended elsewhere": ({"group_ended": "complete"}, Action.STOP, "the run ended: complete"),
    "it ended, and a worker of ours was killed for it": (
        after(-9, group_ended="failed"),
        Action.STOP,
        "failed",
    ),
    "we were left out": ({"fenced": True}, Action.MEET, "a newer generation"),
    "somebody closed the generation": ({"closed": "node lost"}, Action.MEET, "node lost"),
    "closed by another, whose death our workers felt": (after(-9, closed="failure"), Action.MEET, "failure"),
    "closed while we were leaving": (
        {"closed": "node left", "leaving": "SIGTERM"},
        Action.LEAVE,
        "node left",
    ),
    "a worker was killed": (after(-9), Action.FAIL, "rank 4 ended with signal 9"),
    "a worker raised": (after(EXIT_FAILED), Action.FAIL, "rank 4 ended with exit code 1"),
    "a worker raised after others finished": (
        after(EXIT_COMPLETE, 3),
        Action.FAIL,
        "rank 5 ended with exit code 3",
    ),
    "a victim ended before the culprit": (
        after(EXIT_PEER_LOST, -9),
        Action.FAIL,
        "rank 5 ended with signal 9",
    ),
    "two failed": (after(-9, 1), Action.FAIL, "rank 4"),
    "the recipe refused its arguments": (
        after(EXIT_USAGE),
        Action.END,
        "exit code 2, which a restart does not change",
    ),
    "no checkpoint loads": (after(EXIT_NOTHING_LOADS), Action.END, "exit code 76"),
    "a victim, and its cause may still be reported": (after(EXIT_PEER_LOST), Action.GO_ON, "training"),
    "both are victims, just now": (
        after(EXIT_PEER_LOST, EXIT_PEER_LOST, first_end_age_s=VICTIM_PATIENCE_S, keep_alive_s=0.5),
        Action.GO_ON,
        "training",
    ),
    "a victim where silence takes longer to be sure of": (
        after(EXIT_PEER_LOST, first_end_age_s=LATE, keep_alive_s=15.0),
        Action.GO_ON,
        "training",
    ),
    "a victim of a cut that is about to be told": (
        after(EXIT_PEER_LOST, first_end_age_s=3.9),
        Action.GO_ON,
        "training",
    ),
    "a victim, and silence told of nobody either": (
        after(EXIT_PEER_LOST, first_end_age_s=33.8, keep_alive_s=15.0),
        Action.FAIL,
        "rank 4 lost a peer",
    ),
    "a victim, and nobody ever reported a cause": (
        after(EXIT_PEER_LOST, first_end_age_s=LATE),
        Action.FAIL,
        "rank 4 lost a peer",
    ),
    "all finished": (
        after(EXIT_COMPLETE, EXIT_COMPLETE),
        Action.REPORT_DONE,
        "all workers of this node finished",
    ),
    "all finished, and it is known": (
        after(EXIT_COMPLETE, EXIT_COMPLETE, is_done=True),
        Action.GO_ON,
        "training",
    ),
    "all drained for somebody": (
        after(EXIT_INTERRUPTED, EXIT_INTERRUPTED),
        Action.CLOSE_AND_MEET,
        "the same step",
    ),
    "all drained for us": (
        after(EXIT_INTERRUPTED, EXIT_INTERRUPTED, leaving="SIGTERM"),
        Action.LEAVE,
        "SIGTERM",
    ),
    "asked to leave": ({"leaving": "SIGTERM"}, Action.ASK_DRAIN, "SIGTERM"),
    "asked to leave, and draining": ({"leaving": "SIGTERM", "drain_asked": True}, Action.GO_ON, "training"),
    "the drain takes as long as it may": (
        OVER | {"leaving_age_s": 15.0, "drain_asked": True},
        Action.GO_ON,
        "training",
    ),
    "the drain takes too long": (OVER | {"drain_asked": True}, Action.LEAVE, "the grace of 30 s is over"),
    "asked a second time": (
        {"leaving": "Ctrl-C", "skips_drain": True},
        Action.LEAVE,
        "Ctrl-C, and a second signal",
    ),
    "killed while draining": (after(-9, leaving="SIGTERM"), Action.LEAVE, "signal 9 instead of draining"),
    "a worker hangs, and was not heard yet": ({"hung": HUNG}, Action.SHOW_STACKS, "rank 5 hangs"),
    "a worker hangs, and its stacks are in its log": (
        {"hung": HUNG, "stacks_shown": True},
        Action.FAIL,
        "rank 5 hangs",
    ),
    "a worker hangs, and another one died": (
        after(-9, hung=HUNG),
        Action.FAIL,
        "rank 4 ended with signal 9",
    ),
    "a worker hangs, and one that waited for it gave up just now": (
        after(EXIT_PEER_LOST, hung=HUNG, stacks_shown=True),
        Action.FAIL,
        "rank 5 hangs",
    ),
    "a worker hangs instead of draining": (
        {"hung": HUNG, "stacks_shown": True, "leaving": "SIGTERM", "drain_asked": True},
        Action.LEAVE,
        "SIGTERM; rank 5 hangs",
    ),
    "a worker hangs, and a second signal has no time for stacks": (
        {"hung": HUNG, "leaving": "SIGTERM", "skips_drain": True},
        Action.LEAVE,
        "a second signal",
    ),
    "a node wants in": ({"newcomers": True}, Action.ASK_DRAIN, "waiting to join"),
    "a node wants in, and we drain for it": (
        {"newcomers": True, "drain_asked": True},
        Action.GO_ON,
        "training",
    ),
}


@pytest.mark.parametrize("situation", TABLE)
def test_table_of_situations(situation):
    """Each row changes a few things about a node that trains; the reason is what a person reads."""
    changes, action, words = TABLE[situation]
    decision = decide(replace(TRAINING, **changes))
    assert decision.action is action
    assert words in decision.reason


codes = st.sampled_from(
    [
        EXIT_COMPLETE,
        EXIT_FAILED,
        EXIT_USAGE,
        EXIT_PEER_LOST,
        EXIT_INTERRUPTED,
        EXIT_NOTHING_LOADS,
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
        ended=tuple(
            Ended(rank=i, code=code) for i, code in enumerate(draw(st.lists(codes, max_size=workers)))
        ),
        is_done=draw(st.booleans()),
        first_end_age_s=draw(ages),
        keep_alive_s=draw(ages),
        hung=draw(st.sampled_from([None, HUNG])),
        stacks_shown=draw(st.booleans()),
        group_ended=draw(words),
        fenced=draw(st.booleans()),
        closed=draw(words),
        newcomers=draw(st.booleans()),
        leaving=draw(words),
        leaving_age_s=draw(ages),
        grace_s=draw(st.sampled_from([0.0, 30.0])),
        has_begun=draw(st.booleans()),
        drain_asked=draw(st.booleans()),
        skips_drain=draw(st.booleans()),
    )


def alive(seen):
    """Group and generation still stand, so that workers and signals are looked at."""
    return replace(seen, group_ended=None, fenced=False, closed=None)


def failed(seen):
    return [e for e in seen.ended if e.code not in (EXIT_COMPLETE, EXIT_INTERRUPTED)]


@given(observations())
def test_every_situation_has_a_decision_with_a_reason(seen):
    """Whatever comes together: an agent that raises here takes its node down."""
    decision = decide(seen)
    assert isinstance(decision.action, Action)
    assert decision.reason


@given(observations())
def test_a_restart_or_an_end_needs_a_worker_that_failed_or_hangs(seen):
    """Neither membership nor signals may count as failures: they would use up the restarts."""
    action = decide(seen).action
    if action is Action.END or (action is Action.FAIL and not (seen.hung and seen.stacks_shown)):
        assert failed(seen)


@given(observations())
def test_stacks_are_asked_for_once_and_only_of_a_worker_that_hangs(seen):
    """Asking again at every poll would never end the worker."""
    if decide(seen).action is Action.SHOW_STACKS:
        assert seen.hung is not None
        assert not seen.stacks_shown


@given(observations())
def test_the_run_ends_only_for_what_a_restart_does_not_change(seen):
    """An end stops every node."""
    if decide(seen).action is Action.END:
        assert next(e.code for e in failed(seen) if e.code != EXIT_PEER_LOST) in (
            EXIT_USAGE,
            EXIT_NOTHING_LOADS,
        )


def are_only_victims(seen):
    return bool(failed(seen)) and all(e.code == EXIT_PEER_LOST for e in failed(seen))


@given(observations().filter(lambda seen: seen.leaving and not are_only_victims(seen)))
def test_a_node_that_leaves_counts_no_failure(seen):
    """Its workers are killed by the same signal that asked it to go; a failure would cost the others a restart."""
    assert decide(seen).action is not Action.FAIL


def test_a_node_that_leaves_counts_no_failure_for_its_victims_either():
    """A peer's machine and this one are switched off together: workers lose a peer, nobody reports it, and this node is on its way out."""
    victims = after(EXIT_PEER_LOST, leaving="SIGTERM", first_end_age_s=LATE)
    assert decide(replace(TRAINING, **victims)).action is not Action.FAIL


@given(observations())
def test_an_end_of_the_group_comes_before_all_else(seen):
    """No decision of this node's own may undo the verdict of the group."""
    assert decide(replace(seen, group_ended="complete")).action is Action.STOP
    fenced = decide(replace(seen, group_ended=None, fenced=True)).action
    assert fenced is Action.MEET


@given(observations())
def test_a_drain_is_asked_once_and_only_for_a_reason(seen):
    """Asking again at every poll would write the request over and over."""
    decision = decide(seen)
    if decision.action is Action.ASK_DRAIN:
        assert not seen.drain_asked
        assert seen.leaving or seen.newcomers


@given(observations())
def test_a_node_whose_grace_is_over_does_not_stay(seen):
    """The machine is taken away: unless the workers decide something, the node goes."""
    late = replace(alive(seen), leaving="SIGTERM", leaving_age_s=31.0, grace_s=30.0, ended=())
    assert decide(late).action is Action.LEAVE
