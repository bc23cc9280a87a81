"""What an agent does next is a function of what its workers, its group and its signals show; every decision has its reason.

The table, first match wins: run ended · fenced or generation closed · a worker failed · all finished · all drained · grace over · a worker hangs ·
drain asked · go on.
It does not count restarts (the group's state does) and does not act.
"""

from dataclasses import dataclass
from enum import Enum

from elastic.agent.hangs.hang_detector import Hung
from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_NOTHING_LOADS, EXIT_PEER_LOST, EXIT_USAGE
from elastic.rendezvous.partition_detector import SETTLED_AFTER, UNREACHABLE_AFTER

VICTIM_PATIENCE_S = 3.0
# A culprit that cannot speak is known by its silence, and one that is cut off by the complaints about it, which takes the
# longest: a lost node is no failure and costs no restart.
VICTIM_PATIENCE_KEEP_ALIVES = UNREACHABLE_AFTER + SETTLED_AFTER + 0.5


class Action(Enum):
    GO_ON = "go on"
    ASK_DRAIN = "ask drain"  # workers finish the same step, save it and end
    REPORT_DONE = "report done"  # own workers finished the recipe; wait for the others
    MEET = "meet"  # kill what is left of the workers, join the next generation
    CLOSE_AND_MEET = "close and meet"  # a planned end of this generation
    SHOW_STACKS = "show stacks"  # have the worker that hangs say where
    FAIL = (
        "fail"  # a failed worker: close this generation, counting a restart, and meet again if any are left
    )
    END = "end"  # end the run for everybody with the worker's exit code
    LEAVE = "leave"  # leave the group with the interrupted exit code
    STOP = "stop"  # the run ended elsewhere


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one local worker ended: an exit code, or minus the number of the signal."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    workers: int  # how many were started here
    ended: tuple[Ended, ...]  # in the order in which they ended
    is_done: bool  # it was reported that all workers of this node finished
    first_end_age_s: float
    keep_alive_s: float
    hung: Hung | None  # a worker of this node
    stacks_shown: bool  # by that one
    group_ended: str | None  # the verdict's reason
    fenced: bool
    closed: str | None  # the cause, when somebody closed this generation
    newcomers: bool
    leaving: str | None  # why this node wants to leave
    leaving_age_s: float
    grace_s: float
    has_begun: bool  # a step is finished, here or in the state that was restored
    drain_asked: bool
    skips_drain: bool  # a second signal came


def decide(seen: Observation) -> Decision:
    if seen.group_ended is not None:
        return Decision(Action.STOP, f"the run ended: {seen.group_ended}")
    if seen.fenced:
        return Decision(Action.MEET, "a newer generation exists, and this node is not in it")
    if seen.closed is not None:
        action = Action.LEAVE if seen.leaving else Action.MEET
        return Decision(action, f"the generation ended: {seen.closed}")
    of_workers = _by_workers(seen)
    if of_workers is not None:
        return of_workers
    # What is left of the grace belongs to the upload of the newest state in memory.
    if seen.leaving and (seen.skips_drain or seen.leaving_age_s > seen.grace_s / 2):
        why = "a second signal" if seen.skips_drain else f"half of the grace of {seen.grace_s:g} s is over"
        return Decision(Action.LEAVE, f"{seen.leaving}, and {why}")
    if seen.hung is not None:
        return _by_hang(seen.hung, seen)
    if seen.leaving and not seen.has_begun:
        return Decision(Action.LEAVE, f"{seen.leaving}, before it finished a step")
    if seen.leaving and not seen.drain_asked:
        return Decision(Action.ASK_DRAIN, seen.leaving)
    if seen.newcomers and not seen.drain_asked:
        return Decision(Action.ASK_DRAIN, "a node is waiting to join")
    return Decision(Action.GO_ON, "training")


def _by_workers(seen: Observation) -> Decision | None:
    codes = [ended.code for ended in seen.ended]
    wrong = [e for e in seen.ended if e.code not in (EXIT_COMPLETE, EXIT_INTERRUPTED)]
    causes = [e for e in wrong if e.code != EXIT_PEER_LOST]
    if causes:
        return _by_failure(causes[0], seen)
    patience_s = max(VICTIM_PATIENCE_S, VICTIM_PATIENCE_KEEP_ALIVES * seen.keep_alive_s)
    if wrong and seen.first_end_age_s > patience_s:
        if seen.leaving:
            return Decision(Action.LEAVE, f"{seen.leaving}; rank {wrong[0].rank} lost a peer")
        return Decision(Action.FAIL, f"rank {wrong[0].rank} lost a peer, and nobody else reported a failure")
    if wrong or len(codes) < seen.workers:
        return None
    if all(code == EXIT_COMPLETE for code in codes):
        if seen.is_done:
            return None  # the others may still be at it, or fail and need this node again
        return Decision(Action.REPORT_DONE, "all workers of this node finished the recipe")
    if seen.leaving:
        return Decision(Action.LEAVE, seen.leaving)
    return Decision(Action.CLOSE_AND_MEET, "all workers stopped after the same step")


def _by_hang(hung: Hung, seen: Observation) -> Decision:
    if not seen.stacks_shown:
        return Decision(Action.SHOW_STACKS, hung.reason)
    if seen.leaving:
        return Decision(Action.LEAVE, f"{seen.leaving}; {hung.reason}")
    return Decision(Action.FAIL, hung.reason)


def _by_failure(first: Ended, seen: Observation) -> Decision:
    if first.code in (EXIT_USAGE, EXIT_NOTHING_LOADS):
        return Decision(
            Action.END,
            f"rank {first.rank} ended with exit code {first.code}, which a restart does not change",
        )
    how = f"signal {-first.code}" if first.code < 0 else f"exit code {first.code}"
    if seen.leaving:
        return Decision(
            Action.LEAVE, f"{seen.leaving}; rank {first.rank} ended with {how} instead of draining"
        )
    return Decision(Action.FAIL, f"rank {first.rank} ended with {how}")
