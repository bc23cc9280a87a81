"""An agent starts the workers of each generation on its node, watches them, and leaves none.

Read from the top: `run` is the run, one generation after another: join, start, watch. `_watch` is
one generation: look at everything that can change, have decide.py decide, do what generation.py
has for the decision.

It imports no torch: the fork server and the workers do.
"""

from contextlib import suppress

from elastic.agent.decide import Action, Observation, decide
from elastic.agent.final_checkpoint import leave_group, offer_newest
from elastic.agent.generation import NodeGeneration
from elastic.agent.hang_detector import HangDetector
from elastic.agent.parts import GROUP_POLL_S, AgentParts
from elastic.agent.run_directory import has_recorded_end
from elastic.agent.standbys import Standbys
from elastic.agent.watchdog import Watchdog
from elastic.agent.workers import NodeWorkers, worker_starts
from elastic.divergence import Divergence
from elastic.errors import (
    EXIT_AGAIN,
    EXIT_COMPLETE,
    EXIT_DIVERGED,
    EXIT_INTERRUPTED,
    ElasticError,
    Interrupted,
    RendezvousTimeout,
)
from elastic.events import GenerationStarted
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group import RunEnd, WorkerFailure
from elastic.rendezvous.rendezvous import Generation, GroupView
from elastic.rendezvous.store_socket import StoreSockets
from elastic.rendezvous.transitions import DIVERGED, FAILURE, NODE_JOINED, NODE_LEFT, NODE_LOST, REHEARSAL
from elastic.system.leave_deadline import Share

FAULTS = FAILURE, NODE_LOST
WORKER_POLL_S = 0.02
# Before the group's first answer in a generation.
NOTHING_KNOWN = GroupView(open=True, fenced=False, newcomers=(), lost=(), ended=None, cause="", failure=None)


class NodeAgent:
    """`run` sets `end`, how the run has ended for this node.

    failure: the first failed worker of the newest generation that a failure ended, of any node as
    far as this one knows it.
    cut_short: some of its workers ended otherwise than by finishing or draining.
    others_go_on: it left, and other members of its last generation go on with its state.
    gave_up: it waited in vain for others, or for the backend.
    """

    end: RunEnd

    def __init__(self, parts: AgentParts, sockets: StoreSockets) -> None:
        self._sockets = sockets
        self.generation = 0  # the number of the newest that this node was in; 0 for none
        self.failure: WorkerFailure | None = None
        self.cut_short = self.others_go_on = self.gave_up = self._has_trained = False
        self._parts = parts
        self._generation: NodeGeneration | None = None  # None while this node has no workers
        self._earlier_step = 0  # `last_step` when the newest generation started
        self._divergence: Divergence | None = None  # because of which the next workers do steps again
        detector = HangDetector(fixed_limit_s=parts.settings.options.hang_timeout.value or None)
        self._watchdog = Watchdog(detector, parts.page, parts.log, parts.clock)
        self._standbys = Standbys(parts)
        parts.spawner.interrupted = lambda: parts.shutdown.is_over(Share.DRAIN)

    @property
    def last_step(self) -> int:
        """The last step that was trained, as far as this node knows; 0 for none.

        A step that a restore gave up for an older state does not count: it will be trained again.
        """
        newest = self._parts.memory.newest
        # The control page shows no step until the state is restored. A snapshot may be one step
        # ahead of it, and a restore discards those that are newer than the restored state.
        kept_step = 0 if newest is None else newest.info.step
        return max(self._parts.step or self._earlier_step, kept_step)

    @property
    def has_trained(self) -> bool:
        """Whether workers of this node have finished a step, and not only restored a state."""
        parts = self._parts
        has_copied = parts.memory.newest is not None  # of a step, perhaps one ahead of the page
        return self._has_trained or has_copied or parts.step > parts.page.restored_step

    def run(self) -> None:
        """One generation after another; then `end` says how the run ended for this node."""
        end = None
        while end is None:
            # Renew the fork server before the rendezvous: importing inside an open generation would
            # make all other nodes wait.
            self._parts.spawner.renew(self._ends_the_wait)
            try:
                end = self._join_and_train()
            finally:
                self._stop_workers()
        self._standbys.close()
        self.end = end

    def _join_and_train(self) -> RunEnd | None:
        """Returns how the run ended for this node, or None where another generation follows."""
        parts = self._parts
        try:
            entered = parts.group.join(lambda: self._leaving() is not None, meanwhile=self._wait_for_others)
            return self._watch(self._start_workers(entered), entered)
        except Interrupted:
            self.others_go_on = leave_group(parts, self.last_step)
            reason = f"{parts.shutdown.reason} while it waited for the group"
            return RunEnd(exit_code=EXIT_INTERRUPTED, reason=reason)
        except (RendezvousTimeout, BackendFailed) as error:
            # Too few nodes came, or the backend did not answer, for --rdzv-timeout. The same
            # command goes on when that has changed. Others give up as well, and are not waited for.
            self._stop_workers()  # their votes may agree on a newer state, which is saved
            leave_group(parts, self.last_step, goes_alone=True)
            # Or the others completed the run while this node slept, and the place to meet ended
            # with its host.
            is_finished = has_recorded_end(parts.settings.run)
            self.gave_up = True
            return RunEnd(exit_code=EXIT_COMPLETE if is_finished else EXIT_INTERRUPTED, reason=str(error))
        except ElasticError as error:
            # GroupEnded: the run ended while this node was not in the group. Or the group's state
            # is damaged.
            return RunEnd(exit_code=error.exit_code, reason=str(error))

    # One generation.

    def _watch(self, generation: NodeGeneration, entered: Generation) -> RunEnd | None:
        """Returns how the run ended for this node, or None where it is to join the next generation.

        Raises BackendFailed when a node without work has not reached the backend for
        --rdzv-timeout.
        """
        parts, view, polled_s = self._parts, NOTHING_KNOWN, 0.0
        while True:
            parts.health.turn()
            parts.page.leaves = parts.shutdown.reason is not None
            # A worker that ended is a reason to look at the group at once: perhaps it says why.
            has_new_exits = generation.workers.poll()
            poll_s = max(GROUP_POLL_S, parts.group.rendezvous.poll_s)
            if has_new_exits or parts.clock.monotonic() - polled_s >= poll_s:
                view = self._poll(generation, entered) or view
                polled_s = parts.clock.monotonic()
            generation.has_diverged |= not view.open and view.cause == DIVERGED
            decision = decide(self._observe(generation, view))
            match decision.action:
                case Action.CONTINUE:
                    due_s = polled_s + poll_s - parts.clock.monotonic()
                    generation.workers.wait(max(0.0, min(WORKER_POLL_S, due_s)))
                case Action.REQUEST_DRAIN:
                    # A node without others has nobody to compare one more step with.
                    is_alone = parts.shutdown.reason is not None and len(entered.members) == 1
                    generation.request_drain(decision.reason, at_once=is_alone)
                case Action.REPORT_DONE:
                    generation.report_done()
                case Action.DUMP_STACKS:
                    generation.dump_stacks(decision.reason)
                case Action.REJOIN:
                    generation.record_end(decision.reason)
                    return None
                case Action.CLOSE_AND_REJOIN | Action.AGAIN:
                    generation.close(self._planned_cause(view, decision.action), decision.reason)
                    return None
                case Action.REDO:
                    generation.redo(decision.reason)
                    return None
                case Action.FAIL | Action.END_RUN:
                    is_final = decision.action is Action.END_RUN
                    end = (generation.end_run if is_final else generation.fail)(decision.reason)
                    self.failure = generation.failure
                    return end
                case Action.LEAVE:
                    generation.leave(decision.reason)
                    self.others_go_on = leave_group(parts, self.last_step)
                    return RunEnd(exit_code=EXIT_INTERRUPTED, reason=decision.reason)
                case Action.STOP:
                    assert view.ended is not None
                    self.failure = view.failure
                    return view.ended

    def _poll(self, generation: NodeGeneration, entered: Generation) -> GroupView | None:
        """Serve what surrounds the workers; None when the rendezvous backend does not answer."""
        parts, workers = self._parts, generation.workers
        parts.memory.poll()
        parts.note_commit()
        self._settle_divergence()
        # A plain script sends no heartbeats.
        if parts.settings.imports_library and parts.settings.options.hang_timeout.kind != "off":
            self._watchdog.poll(workers)
        pids = {rank: workers.pid(rank) for rank in workers.running}
        parts.faults.poll(entered, parts.common_step, pids)
        parts.revive_uploader()
        if pids:
            self._standbys.poll([*pids.values()])
        return parts.group.poll(step=parts.step, is_idle=not workers.running)

    def _planned_cause(self, view: GroupView, action: Action) -> str:
        if action is Action.AGAIN or (self._parts.page.rehearses and not view.newcomers):
            return REHEARSAL
        return NODE_JOINED if view.newcomers else NODE_LEFT

    def _wait_for_others(self) -> None:
        self._parts.revive_uploader()
        self._standbys.poll([])

    def _ends_the_wait(self) -> bool:
        # The state that this node has may have to be saved before there is a generation.
        self._parts.revive_uploader()
        return self._leaving() is not None

    def _leaving(self, *, is_whole: bool = False) -> str | None:
        """Why this node was asked to leave, once it is to. is_whole: its generation trains, or has
        ended as planned. Else, of a state in parts, it first lets the workers of the next one save
        what other nodes alone have some parts of, if that comes in time: one of them may be dead.
        """
        parts, newest = self._parts, self._parts.memory.newest
        lacks_parts = newest is not None and len({each.number for each in newest.info.parts}) < newest.info.of
        stays = lacks_parts and not is_whole and not parts.shutdown.is_over(Share.JOIN)
        return None if stays else parts.shutdown.reason

    def _observe(self, generation: NodeGeneration, view: GroupView) -> Observation:
        """What a decision depends on. view: the newest answer of the group."""
        parts, workers = self._parts, generation.workers
        settings, shutdown, watchdog = parts.settings, parts.shutdown, self._watchdog
        codes = {each.code for each in workers.exits.values()}
        return Observation(
            workers=settings.nproc,
            exits=tuple(workers.exits.values()),
            first_exit_age_s=workers.first_exit_age_s(),
            has_evidence=(EXIT_DIVERGED in codes and generation.divergence is not None)
            or (EXIT_AGAIN in codes and settings.evidence.exists()),
            is_done=generation.is_done,
            keep_alive_s=settings.options.keep_alive_s,
            hung=watchdog.hung,
            stacks_dumped=watchdog.error is not None,
            group_ended=None if view.ended is None else view.ended.reason,
            fenced=view.fenced,
            closed=None if view.open else view.cause,
            newcomers=parts.group.admits(view),
            leaving=self._leaving(is_whole=parts.has_begun and (view.open or view.cause not in FAULTS)),
            drain_is_over=shutdown.is_over(Share.DRAIN),
            is_plain=not settings.imports_library,
            has_begun=parts.has_begun,
            drain_requested=generation.drain_requested,
            has_drain=parts.page.drain,
        )

    def _settle_divergence(self) -> None:
        """Forget a difference that the workers have settled."""
        if self._parts.page.is_settled:
            self._parts.page.is_settled, self._divergence = False, None

    # The workers of a generation.

    def _start_workers(self, entered: Generation) -> NodeGeneration:
        parts, settings, self.generation = self._parts, self._parts.settings, entered.number
        # The uploader learns the new number first: a save in progress, of the generation before, is
        # not fenced then while workers start.
        parts.uploader.enter(entered.number)
        parts.log.generation = entered.number
        is_state_awaited = parts.group.enter(entered)
        # The control page still has the steps of the generation before.
        self._earlier_step, self._has_trained = self.last_step, self.has_trained
        parts.shutdown.begins()
        parts.page.clear()
        parts.memory.publish()
        self._watchdog.start_generation()
        self._record_start(entered)
        with suppress(OSError):  # a full disk: a worker that fails then leaves its error in its log alone
            settings.error_folder(entered.number).mkdir(parents=True, exist_ok=True)
        store = self._sockets.take(entered.endpoint)
        if store is not None and not settings.imports_library:
            # Torch opens the store there, in rank 0 of such a script. A process that takes the port
            # before it does costs a restart.
            store.close()
            store = None
        starts = worker_starts(entered, parts, store, divergence=self._divergence)
        workers = NodeWorkers(starts, parts, self._standbys.take)
        self._standbys.begin(ran_anew=len(workers.of_standbys) < len(starts))
        if store is not None:
            store.close()  # the worker has it: peers are to learn at once when that ends
        self._generation = NodeGeneration(parts, entered.number, workers, self._watchdog)
        parts.health.generation = entered.number
        if is_state_awaited and parts.group.is_first:
            # A node that left waits until the state that it left behind is committed.
            offer_newest(parts)
        return self._generation

    def _record_start(self, entered: Generation) -> None:
        parts, size, cause = self._parts, entered.world_size, entered.cause
        if cause != REHEARSAL:
            nodes = len(entered.members)
            parts.console.print_line(
                f"generation {entered.number} ({cause}): {size} worker{'s' * (size > 1)} on {nodes} node{'s' * (nodes > 1)}"
            )
        if parts.group.is_first:
            parts.log.record(
                GenerationStarted(
                    world_size=size,
                    nodes=[node.id for node in entered.members],
                    cause=cause,
                    restarts=entered.restarts,
                    plain=not parts.settings.imports_library,
                )
            )

    def _stop_workers(self) -> None:
        """Kill the workers that are left, if this node has any."""
        if self._generation is None:
            return
        self._parts.health.generation = None
        self._generation.kill_workers()
        self._settle_divergence()
        self._divergence = self._generation.divergence or self._divergence
        self.cut_short = self._generation.workers.was_cut_short
        self._generation = None
