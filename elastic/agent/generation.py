"""What each action of decide.py does to the workers, the group and the snapshots of this node.

decide.py chooses the action; a reason arrives here as text, for people. Before a failure ends the
run, `fail` waits for as long as it takes to find a dead node, whose death may be the cause. A
change of the group takes a few calls to the backend, and more where other nodes write at the same
moment; a silent backend delays an action by one call's limit; of a node that leaves, by its task's
share at most.
"""

from elastic.agent.decide import LIBRARY_FINAL_CODES
from elastic.agent.final_checkpoint import offer_newest
from elastic.agent.parts import GROUP_POLL_S, AgentParts
from elastic.agent.watchdog import Watchdog
from elastic.agent.workers import KILL_WAIT_S, NodeWorkers
from elastic.divergence import Divergence
from elastic.errors import EXIT_FAILED, EXIT_RECIPE, EXIT_USAGE
from elastic.events import DrainRequested, GenerationEnded
from elastic.rendezvous.group import Group, RunEnd, WorkerFailure
from elastic.rendezvous.transitions import DIVERGED, FAILURE, NODE_LEFT, REHEARSAL
from elastic.system.leave_deadline import Share
from elastic.system.worker_protocol import read_errors

LOST_AFTER = 1.5  # keep-alive periods after which a dead node is known, also where it was watched by few


class NodeGeneration:
    """One generation on this node, from the start of its workers until all of them are gone."""

    def __init__(self, parts: AgentParts, number: int, workers: NodeWorkers, watchdog: Watchdog) -> None:
        self.workers = workers
        self.number = number
        self.drain_requested = False
        self.is_done = False  # the group knows that all workers of this node finished
        self.failure: WorkerFailure | None = None  # set by `fail`, `redo` and `end_run`
        self.has_diverged = False  # workers of some node found that the ranks' states differ
        self._parts, self._watchdog = parts, watchdog
        self._are_killed = False

    def request_drain(self, reason: str, *, at_once: bool) -> None:
        """at_once: no step more."""
        parts = self._parts
        self.drain_requested = True
        # The workers of this node read the page in each step, and the end-of-step all-reduce
        # carries the request to all ranks. So all ranks of all nodes learn of it in the same step,
        # and end after it, or after the next one where that is to be done again.
        parts.page.drains_at_once = at_once  # before the request itself, which is read first
        parts.page.drain = True
        parts.log.record(DrainRequested(reason=reason))
        parts.console.print_line(f"{reason}: all workers finish the same step and save it")

    def report_done(self) -> None:
        """All workers of this node finished: report it to the group, if the backend answers."""
        # The last step was committed a moment ago, and no poll follows that would tell of it.
        self._parts.note_commit()
        self.is_done = self._parts.group.report_done()
        if not self.is_done:
            self._parts.clock.sleep(GROUP_POLL_S)

    def dump_stacks(self, reason: str) -> None:
        self._parts.console.print_line(f"{reason}; its log has the stacks of its threads")
        self._watchdog.record_hang(self.workers)

    def record_end(self, cause: str, *, is_said: bool = True) -> None:
        parts = self._parts
        has_trained = parts.step > parts.page.restored_step
        when = f" after step {parts.step}" if has_trained else " before its first step"
        when = when if parts.settings.imports_library else ""
        if is_said:
            parts.console.print_line(f"generation {self.number} ends{when}: {cause}")
        parts.log.record(GenerationEnded(cause=cause, step=parts.step))

    def close(self, cause: str, reason: str, *, counts: bool = False) -> Group | None:
        """End the generation on all nodes. counts: it uses up a restart.

        The group learns of it before this node kills its workers, which takes a moment: meanwhile
        the other nodes kill theirs.
        """
        parts = self._parts
        group = parts.group.close(cause, step=parts.step, counts=counts, failure=self.failure)
        self.has_diverged |= group is not None and group.cause == DIVERGED  # another node's ranks
        self.kill_workers()
        self.record_end(reason, is_said=cause != REHEARSAL)
        if group is None and self.failure is not None:
            # It is out of reach, perhaps because all other nodes are gone. The newest state may
            # exist in this node's memory alone: the uploader makes it durable while this node waits
            # in the next rendezvous.
            parts.console.print_line(
                "the rendezvous does not answer; the newest state is being saved, and this node waits for it"
            )
            offer_newest(parts)
        return group

    def fail(self, reason: str) -> RunEnd | None:
        """A worker of this node failed: close the generation for all nodes.

        Returns the end of the run where no restart is left.
        """
        parts, limit = self._parts, self._parts.settings.options.max_restarts
        self.failure = self._first_failure(reason)
        group = self.close(FAILURE, reason, counts=True)
        # The group counts the restarts. If it went on to a newer generation, this failure came too
        # late to count.
        if group is None or group.generation != self.number or group.restarts <= limit:
            return None
        # The failure that the group recorded came first, perhaps on another node.
        self.failure = group.failure or self.failure
        # Workers that lose a peer, or go with their machine, fail before the death of that node is
        # known. Then the failure costs no restart.
        if parts.group.loses_member(parts.settings.options.keep_alive_s * LOST_AFTER):
            return None
        # Nothing is known of the steps of a script without this library.
        in_a_row = " in a row without a new step" if parts.settings.imports_library else ""
        why = f"that was failure {group.restarts}{in_a_row}, and --max-restarts is {limit}"
        end = RunEnd(exit_code=EXIT_FAILED, reason=f"{reason}; {why}")
        parts.group.end(end)
        return end

    def redo(self, reason: str) -> None:
        """Workers differed: close the generation for all nodes, which counts no restart."""
        self.has_diverged = True
        self.failure = self._first_failure(reason)
        self.close(DIVERGED, f"{reason}: {self.failure.message}")

    def end_run(self, reason: str) -> RunEnd:
        """A worker ended as it would again after a restart: end the run on all nodes, as it did.

        Its own workers are killed first: their errors name the reason.
        """
        parts = self._parts
        self.kill_workers()
        self.failure = self._first_failure(reason)
        code = next(each.code for each in self.workers.exits.values() if each.code in LIBRARY_FINAL_CODES)
        if not is_own_exit(self.failure.message, code):
            reason = self.failure.message
        end = RunEnd(exit_code=EXIT_FAILED if code == EXIT_RECIPE else code, reason=reason)
        if parts.group.close(FAILURE, step=parts.step, counts=False, failure=self.failure) is not None:
            parts.group.end(end)
        return end

    def leave(self, reason: str) -> None:
        """The workers end before this node leaves the group."""
        parts = self._parts
        if not parts.settings.imports_library:
            # Its workers did not drain. When they end, those of other nodes may fail: that counts
            # no restart in a generation that is closed. A quarter of a drain's time is enough for
            # that; the workers need the rest.
            longest_s = parts.shutdown.grace_s * Share.DRAIN.value / 4
            parts.group.close(NODE_LEFT, step=parts.step, counts=False, failure=None, longest_s=longest_s)
        self.kill_workers()
        self.record_end(reason)

    def kill_workers(self) -> None:
        """SIGKILL: what counts is in the snapshot memory, which outlives them.

        A script without this library has no such memory. It gets SIGTERM first, and the time of a
        drain to end by itself.
        """
        parts = self._parts
        # Once: by the time of a second call their pids may belong to other processes.
        if not self._are_killed:
            self._are_killed = True
            if not parts.settings.imports_library:
                limit_s = parts.shutdown.grace_s * Share.DRAIN.value
                self.workers.terminate(limit_s, lambda: parts.shutdown.is_over(Share.DRAIN))
            # A hung worker whose stacks were dumped is to blame, whatever the others report.
            within_s = parts.shutdown.left_s(Share.GROUP, KILL_WAIT_S)
            self.workers.kill(self._watchdog.error, within_s=within_s)
            # Before a snapshot is restored or committed, the ranks must have agreed on it. Where
            # they were found to differ, only what was marked as agreed before counts.
            has_diverged = self.has_diverged or self.divergence is not None
            workers = [] if has_diverged else range(parts.settings.nproc)
            parts.memory.keep_agreed([parts.page.votes(i) for i in workers])

    @property
    def divergence(self) -> Divergence | None:
        """What the workers that ended know of a difference between ranks."""
        errors = read_errors(self._parts.settings.error_folder(self.number), list(self.workers.exits))
        return next((error.divergence for error in errors if error.divergence is not None), None)

    def _first_failure(self, reason: str) -> WorkerFailure:
        return self.workers.record_failure(reason, self.number, self._watchdog.error)


def is_own_exit(message: str, code: int) -> bool:
    """Whether a script ended itself with the code for a wrong command, as argparse does."""
    return code == EXIT_USAGE and message == f"SystemExit: {code}"
