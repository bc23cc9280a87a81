"""What an agent does next is a function of one observation of its workers, group and signals.

`RULES` is that function, as data: the first rule whose condition holds decides, and the last one
always holds. A node that leaves does not report a failure that a restart may mend; it just leaves.
An agent evaluates it many times a second. This module does not act (agent.py and generation.py do),
does not read a clock, and does not count restarts, which the group's shared state does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from elastic import errors
from elastic.events import HangDetected
from elastic.rendezvous.partition import SETTLED_AFTER, UNREACHABLE_AFTER

# How long an agent whose workers only lost a peer waits for another agent to report the failure
# behind it. A failed worker is reported at once. A dead node is noticed by its silence, after one
# keep-alive. A node that is cut off is noticed by the reports that it is unreachable, which takes
# longest: the patience must cover that, because a lost node is a change of membership, while an
# unexplained failure costs one of the run's restarts.
VICTIM_PATIENCE_S = 3.0
VICTIM_PATIENCE_KEEP_ALIVES = UNREACHABLE_AFTER + SETTLED_AFTER + 0.5

FINAL_CODES = (errors.EXIT_USAGE, errors.EXIT_NOTHING_LOADS)  # a restart would end with the same code
LIBRARY_FINAL_CODES = (*FINAL_CODES, errors.EXIT_RECIPE)  # of a script that imports this library


class Action(Enum):
    CONTINUE = "continue"
    REQUEST_DRAIN = "request drain"  # the workers finish the same step, keep its state and exit
    REPORT_DONE = "report done"  # own workers finished the recipe; the run ends when those of all nodes have
    REJOIN = "rejoin"  # kill the workers that are left, join the next generation
    CLOSE_AND_REJOIN = "close and rejoin"  # end this generation as planned, without counting a restart
    DUMP_STACKS = "dump stacks"  # have the hung worker write the stacks of its threads into its log
    AGAIN = "again"  # close this generation: a step that was done again differs, and is done once more
    REDO = "redo"  # close this generation without counting a restart: ranks differed, steps are done again
    FAIL = "fail"  # close this generation, counting a restart, and rejoin if restarts are left
    END_RUN = "end run"  # end the run on all nodes, with the code of the failure
    LEAVE = "leave"  # leave the group, with the exit code for interrupted
    STOP = "stop"  # the run has ended on all nodes: exit as it did


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """`code`: the exit code of a local worker, or minus the number of the signal that ended it.

    open_step: the step of its loop that it was in, 0 before the first; None outside of a loop.
    """

    rank: int
    code: int
    open_step: int | None = None

    @property
    def is_within_loop(self) -> bool:
        """It ended as if it had finished, and its loop had not ended."""
        return self.code == errors.EXIT_COMPLETE and self.open_step is not None

    def __str__(self) -> str:
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        ended = f"rank {self.rank} ended with {how}"
        if not self.is_within_loop:
            return ended
        place = f"in step {self.open_step}" if self.open_step else "before its first step"
        return (
            f"{ended} within the loop, {place}: os._exit, a library that calls exit, or a recipe that catches an error of run.steps,"
            " leaves no defined end; use break or run.stop(reason)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that a decision depends on; ages and durations in seconds."""

    workers: int  # how many were started on this node
    exits: tuple[WorkerExit, ...]  # of those that ended, in that order
    first_exit_age_s: float  # since the first of them was seen
    has_evidence: bool  # a worker that ended with EXIT_DIVERGED or EXIT_AGAIN left what differs
    is_done: bool  # the group knows that all workers of this node finished
    keep_alive_s: float
    hung: HangDetected | None  # a worker of this node
    stacks_dumped: bool  # the hung worker was asked for its stacks
    group_ended: str | None  # why the run has ended, once it has
    fenced: bool  # the group no longer has this node in its generation
    closed: str | None  # why this generation was closed, once it was
    newcomers: bool  # nodes that wait to join are to be admitted now
    leaving: str | None  # why this node was asked to leave, once it was
    drain_is_over: bool  # its share of the grace
    is_plain: bool  # a script without this library: it knows no drain, and exits as it likes
    has_begun: bool  # a worker has entered its first step
    drain_requested: bool  # by this agent, in this generation
    has_drain: bool  # the workers of this node were asked to drain, by any agent or a signal

    @property
    def failure(self) -> WorkerExit | None:
        """The first worker that failed by itself; if none did, the first that lost a peer."""
        ends_well = [errors.EXIT_COMPLETE, *([errors.EXIT_INTERRUPTED] if self.has_drain else [])]
        failures = [each for each in self.exits if each.code not in ends_well or each.is_within_loop]
        by_itself = [each for each in failures if each.code != errors.EXIT_PEER_LOST]
        return next(iter(by_itself + failures), None)

    @property
    def code(self) -> int | None:
        """With which the worker of `failure` ended."""
        return None if self.failure is None else self.failure.code

    @property
    def lost_peer(self) -> bool:
        """Workers failed, but none by itself."""
        return self.code == errors.EXIT_PEER_LOST and not self.is_plain

    @property
    def is_final(self) -> bool:
        """A worker failed by itself, and would again after each restart."""
        return self.code in (FINAL_CODES if self.is_plain else LIBRARY_FINAL_CODES)

    @property
    def is_unexplained(self) -> bool:
        """Workers lost a peer, and no agent has reported the failure behind it in time."""
        patience_s = max(VICTIM_PATIENCE_S, VICTIM_PATIENCE_KEEP_ALIVES * self.keep_alive_s)
        return self.lost_peer and self.first_exit_age_s > patience_s

    @property
    def all_finished(self) -> bool:
        codes = [each.code for each in self.exits if not each.is_within_loop]
        return codes == self.workers * [errors.EXIT_COMPLETE]

    @property
    def all_drained(self) -> bool:
        """All workers ended well, but not all at the end of the recipe."""
        return len(self.exits) == self.workers and self.failure is None and not self.all_finished


_REPORTS = (Action.REDO, Action.AGAIN, Action.FAIL)  # of what went wrong here, which a leaver does not make


class Rule(NamedTuple):
    holds: Callable[[Observation], object]
    action: Action
    reason: str  # a template; `o` is the observation


RULES: tuple[Rule, ...] = (
    # The group's decisions come first. A node may not go on where the run has ended, or train in a
    # generation that is over: what its own workers did meanwhile, including dying because of
    # it, no longer matters.
    Rule(lambda o: o.group_ended is not None, Action.STOP, "the run ended: {o.group_ended}"),
    Rule(lambda o: o.fenced, Action.REJOIN, "a newer generation exists, and this node is not in it"),
    Rule(lambda o: o.closed is not None and o.leaving, Action.LEAVE, "the generation ended: {o.closed}"),
    Rule(lambda o: o.closed is not None, Action.REJOIN, "the generation ended: {o.closed}"),
    # A worker failed by itself. Some exit codes mean that every restart would end the same way. A
    # difference between ranks costs no restart: doing the steps again decides about it, and if
    # they differ again the workers exit with a code that ends the run. Without what differs, such a
    # code is any other failure.
    Rule(lambda o: o.is_final, Action.END_RUN, "{o.failure}, which a restart does not change"),
    Rule(lambda o: o.code == errors.EXIT_DIVERGED and o.has_evidence, Action.REDO, "the ranks differed"),
    Rule(
        lambda o: o.code == errors.EXIT_AGAIN and o.has_evidence,
        Action.AGAIN,
        "a step that was done again differs",
    ),
    Rule(lambda o: o.failure is not None and not o.lost_peer, Action.FAIL, "{o.failure}"),
    # Workers here are victims of a failure elsewhere. The agent that saw it closes the generation,
    # and a rule above applies; only if none does in time is a failure reported from here.
    Rule(
        lambda o: o.is_unexplained,
        Action.FAIL,
        "rank {o.failure.rank} lost a peer, and no reported failure explains it",
    ),
    # A node that leaves does not wait for ever, neither for its drain nor for a backend that does
    # not answer: the rest of its grace belongs to the upload of the newest state in memory.
    # This comes before a hang, for whose stacks there is no time left.
    Rule(
        lambda o: o.leaving and o.drain_is_over,
        Action.LEAVE,
        "{o.leaving}, and the time to finish a step is over",
    ),
    # All workers ended well. Once the group knows that those of this node finished, the agent
    # waits: the others may still be training, or fail and need this node again.
    Rule(lambda o: o.all_finished and not o.is_done, Action.REPORT_DONE, "all workers of this node finished"),
    Rule(lambda o: o.all_drained and o.leaving, Action.LEAVE, "{o.leaving}"),
    Rule(lambda o: o.all_drained, Action.CLOSE_AND_REJOIN, "all workers stopped after the same step"),
    # A hung worker shows its stacks first, once; it is killed by what follows.
    Rule(lambda o: o.hung and not o.stacks_dumped, Action.DUMP_STACKS, "{o.hung.reason}"),
    Rule(lambda o: o.hung, Action.FAIL, "{o.hung.reason}"),
    # Planned ends. A script without this library cannot drain, and is stopped as torchrun stops it;
    # not for a newcomer once it has begun to finish.
    Rule(lambda o: o.is_plain and o.leaving, Action.LEAVE, "{o.leaving}"),
    Rule(lambda o: o.is_plain and o.newcomers and not o.exits, Action.CLOSE_AND_REJOIN, "a node joins"),
    Rule(lambda o: o.is_plain, Action.CONTINUE, "training"),
    # Ask for a drain, once. A node that leaves has nothing to keep before the first step. A drain
    # for a newcomer does at least one step: frequent joins would stop all progress otherwise.
    Rule(lambda o: o.leaving and not o.has_begun, Action.LEAVE, "{o.leaving}"),
    Rule(lambda o: o.leaving and not o.drain_requested, Action.REQUEST_DRAIN, "{o.leaving}"),
    Rule(lambda o: o.newcomers and not o.drain_requested, Action.REQUEST_DRAIN, "a node is waiting to join"),
    Rule(lambda _: True, Action.CONTINUE, "training"),
)


def decide(observation: Observation) -> Decision:
    """The action of the first rule that holds, with its reason as a sentence for people."""
    rule = next(rule for rule in RULES if rule.holds(observation))
    reason = rule.reason.format(o=observation)
    # The shutdown of a machine kills its workers too: that must not cost the others a restart.
    if rule.action in _REPORTS and observation.leaving:
        return Decision(Action.LEAVE, f"{observation.leaving}; {reason}")
    return Decision(rule.action, reason)
