"""An agent starts the workers of each generation on its node, watches them, and leaves none.

Read from the top: `_invoke_run` is the run, one generation after another. `_run_generation` is one
generation: look at everything that can change, have decide.py decide, do what actions.py has for
the decision. Neither waits for a worker to finish; only workers that were killed are waited for.

A subclass of torch's LocalElasticAgent, so that the rendezvous and the ranks keep torch's
interfaces; the processes and the state machine are our own (docs/decisions/0002 has the reasons).
Methods with torch's names override torch's.
"""

import signal
from contextlib import suppress
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from elastic.agent.actions import GROUP_POLL_S, AgentParts, NodeGeneration
from elastic.agent.decide import Action, Observation, WorkerExit, decide
from elastic.agent.finished_run import has_recorded_end
from elastic.agent.workers.node_workers import NodeWorkers
from elastic.agent.workers.worker_variables import worker_starts
from elastic.divergence import Divergence
from elastic.errors import (
    EXIT_COMPLETE,
    EXIT_DIVERGED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ElasticError,
    Interrupted,
    RendezvousTimeout,
)
from elastic.events import GenerationStarted
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.generation import Generation
from elastic.rendezvous.group import RunEnd, WorkerFailure
from elastic.rendezvous.group_view import GroupView
from elastic.rendezvous.rendezvous import Rendezvous
from elastic.rendezvous.torch_handler import ElasticRendezvous, EndpointHost
from elastic.rendezvous.transitions import DIVERGED, NODE_JOINED, NODE_LEFT, REHEARSAL
from elastic.system.control_page import Settled
from elastic.system.leave_deadline import Share
from elastic.system.worker_error import RaisedError

WORKER_POLL_S = 0.02
WRONG_TIMES_TO_LEAVE = 2
# Before the group's first answer in a generation.
NOTHING_KNOWN = GroupView(open=True, fenced=False, newcomers=(), lost=(), ended=None, cause="", failure=None)


class NodeAgent(LocalElasticAgent):
    """`run` returns when the run has ended for this node; then `end` says how.

    failure: the first failed worker of the newest generation that a failure ended, of any node as
    far as this one knows it.
    cut_short: some of its workers ended otherwise than by finishing or draining.
    others_go_on: it left, and other members of its last generation go on with its state.
    gave_up: it waited in vain for others, or for the backend.
    """

    end: RunEnd

    def __init__(self, parts: AgentParts, rendezvous: Rendezvous, host: EndpointHost) -> None:
        settings = parts.settings
        self._handler = ElasticRendezvous(
            rendezvous,
            host,
            run_id=settings.options.rdzv_id or settings.run.local.name,
            interrupted=self._is_interrupted,
        )
        spec = WorkerSpec(
            role="default",
            local_world_size=settings.nproc,
            rdzv_handler=self._handler,
            entrypoint=settings.options.recipe,
            max_restarts=settings.options.max_restarts,
        )
        # Without a folder of its own, torch's log specification would leave a new one behind at
        # every start.
        super().__init__(spec=spec, logs_specs=DefaultLogsSpecs(log_dir=str(settings.scratch)))
        self.failure: WorkerFailure | None = None
        self.cut_short = self.others_go_on = self.gave_up = self._has_trained = False
        self._parts = parts
        self._generation: NodeGeneration | None = None  # None while this node has no workers
        self._earlier_step = 0  # `last_step` when the newest generation started
        # Consecutive failures without a new step which the restored state may have caused: all but
        # those by SIGKILL. The workers skip a state that was restored too often without progress.
        self._suspect_failures = 0
        self._raised: list[list[RaisedError]] = []  # by this node's workers, in each generation
        # Because of which the next workers do steps again; their agreement settles it.
        self._divergence: Divergence | None = None
        self._wrong_steps: list[int] = []  # after which this node was found to have been wrong
        self._is_second_start = self._has_stepped = False  # of the script; in the generation before
        self._owed_step = 0  # the last one that workers do again before this node leaves; 0 for none

    @property
    def last_step(self) -> int:
        """The last step that was trained, as far as this node knows; 0 for none.

        A step that a restore gave up for an older state does not count: it will be trained again.
        """
        newest = self._parts.memory.newest
        # The control page shows no step until the state is restored. A snapshot may be one step
        # ahead of it, and a restore discards those that are newer than the restored state.
        kept_step = 0 if newest is None else newest.info.step
        return max(self._parts.step or self._earlier_step, kept_step, self._owed_step)

    @property
    def has_trained(self) -> bool:
        """Whether workers of this node have finished a step, and not only restored a state."""
        parts = self._parts
        has_copied = parts.memory.newest is not None  # of a step, perhaps one ahead of the page
        return self._has_trained or has_copied or parts.step > parts.page.restored_step

    @property
    def generation(self) -> int:
        """The number of the newest that this node was in; 0 for none."""
        entered = self._handler.generation
        return 0 if entered is None else entered.number

    # The run, one generation after another.

    def _invoke_run(self, role: str = "default") -> RunResult:
        parts, group = self._parts, self._worker_group
        while True:
            # Renew before the rendezvous: importing inside an open generation would make all other
            # nodes wait.
            parts.spawner.renew(self._waits_in_vain)
            try:
                self._initialize_workers(group)  # torch's: `_rendezvous`, then `_start_workers`
                end = self._run_generation()
            except Interrupted:
                self.others_go_on = parts.leave_group(parts.has_shared_state, self.last_step)
                reason = f"{parts.shutdown.reason} while it waited for the group"
                end = RunEnd(exit_code=self._leaving_code, reason=reason)
            except (RendezvousTimeout, BackendFailed) as error:
                # Too few nodes came, or the backend did not answer, for --rdzv-timeout. The same
                # command goes on when that has changed. Others give up as well, and are not waited
                # for.
                parts.leave_group(lambda _generation: False, self.last_step)
                # Or the others completed the run while this node slept, and the place to meet ended
                # with its host.
                is_finished = has_recorded_end(parts.settings.run)
                self.gave_up = True
                end = RunEnd(exit_code=EXIT_COMPLETE if is_finished else EXIT_INTERRUPTED, reason=str(error))
            except ElasticError as error:
                # GroupEnded: the run ended while this node was not in the group. Or the group's
                # state is damaged. Torch's `run` calls `_shutdown`, which ends the workers.
                end = RunEnd(exit_code=error.exit_code, reason=str(error))
            if end is not None:
                self.end = end
                group.state = WorkerState.SUCCEEDED if end.exit_code == EXIT_COMPLETE else WorkerState.FAILED
                return RunResult(state=group.state)
            self._stop_workers(group)

    # One generation.

    def _run_generation(self) -> RunEnd | None:
        """Returns how the run ended for this node, or None where it is to join the next generation.

        Raises BackendFailed when a node without work has not reached the backend for
        --rdzv-timeout.
        """
        generation, clock = self._generation, self._parts.clock
        assert generation is not None
        view, polled_s = NOTHING_KNOWN, 0.0
        while True:
            self._parts.health.turn()
            # A worker that ended is a reason to look at the group at once: perhaps it says why.
            poll_s = max(GROUP_POLL_S, self._parts.group.poll_s)
            if clock.monotonic() - polled_s >= poll_s or generation.workers.poll():
                view = self._poll(generation) or view
                polled_s = clock.monotonic()
            generation.has_diverged |= not view.open and view.cause == DIVERGED
            decision = decide(self._observe(generation, view))
            match decision.action:
                case Action.CONTINUE:
                    generation.workers.wait(WORKER_POLL_S)
                case Action.REQUEST_DRAIN:
                    self._request_drain(generation, decision.reason)
                case Action.REPORT_DONE:
                    generation.report_done()
                case Action.DUMP_STACKS:
                    generation.dump_stacks(decision.reason)
                case Action.REJOIN:
                    self._count(view.failure)
                    generation.record_end(decision.reason)
                    return None
                case Action.CLOSE_AND_REJOIN | Action.AGAIN:
                    generation.close_and_end(self._planned_cause(view, decision.action), decision.reason)
                    return None
                case Action.REDO:
                    generation.redo(decision.reason)
                    return None
                case Action.FAIL | Action.END_RUN:
                    is_final = decision.action is Action.END_RUN
                    end = (
                        generation.end_run(decision.reason)
                        if is_final
                        else generation.fail(decision.reason, self._raised)
                    )
                    self.failure = generation.failure
                    self._count(generation.failure)
                    return end
                case Action.LEAVE:
                    if self._is_worth_a_redo(generation, decision.reason):
                        return None
                    self.others_go_on = generation.leave(decision.reason, lambda: self.last_step)
                    return RunEnd(exit_code=self._leaving_code, reason=decision.reason)
                case Action.STOP:
                    assert view.ended is not None
                    self.failure = view.failure
                    return view.ended

    def _poll(self, generation: NodeGeneration) -> GroupView | None:
        """Serve what surrounds the workers; None when the rendezvous backend does not answer."""
        parts, workers = self._parts, generation.workers
        parts.memory.poll()
        parts.commits.poll()
        parts.run_dir_watch.poll()
        self._settle_divergence()
        # A plain script sends no heartbeats.
        if parts.settings.imports_library and parts.settings.options.hang_timeout.kind != "off":
            parts.watchdog.poll(workers)
        pids = {rank: workers.pid(rank) for rank in workers.running}
        parts.faults.poll(self._entered, parts.common_step, pids)
        parts.revive_uploader()
        return parts.group.poll(step=parts.step, is_idle=not workers.running)

    def _request_drain(self, generation: NodeGeneration, reason: str) -> None:
        """Where nobody is left to compare a step more, or the drain is to end before a certain one,
        the generation ends at once.
        """
        is_alone = self._parts.shutdown.reason is not None and len(self._entered.members) == 1
        at_once = is_alone or self._owed_step > 0
        generation.request_drain(reason, after=self._owed_step, at_once=at_once)

    def _planned_cause(self, view: GroupView, action: Action) -> str:
        if action is Action.AGAIN or (self._parts.page.rehearses and not view.newcomers):
            return REHEARSAL
        return NODE_JOINED if view.newcomers else NODE_LEFT

    def _is_worth_a_redo(self, generation: NodeGeneration, reason: str) -> bool:
        """Whether the steps that no snapshot holds are done again before this node leaves.

        A drain may fail: an evaluation outlasts it, or a worker hangs or dies. The state after the
        last step is then lost, but it follows from the one before.
        """
        parts = self._parts
        shutdown = parts.shutdown
        if not parts.settings.imports_library or shutdown.is_banned or shutdown.is_over(Share.REDO):
            return False
        last_step = self.last_step
        generation.kill_workers()
        newest = parts.memory.newest
        kept_step = 0 if newest is None else newest.info.step
        if kept_step >= last_step:
            return False
        self._owed_step = last_step
        generation.close_and_end(NODE_LEFT, reason)
        parts.console.print_line(
            f"the steps from {kept_step + 1} to {last_step} are in no snapshot: they are done again before this node leaves"
        )
        return True

    @property
    def workers_share(self) -> Share:
        """Of the grace, that the workers have."""
        return Share.REDO if self._owed_step else Share.DRAIN

    def _waits_in_vain(self) -> bool:
        # The state that this node has may have to be saved before there is a generation.
        self._parts.revive_uploader()
        return self._is_interrupted()

    def _is_interrupted(self) -> bool:
        """Asked again and again while this node waits for a generation, by more than one thread."""
        shutdown = self._parts.shutdown
        is_owing = self._owed_step > 0 and not shutdown.is_banned and not shutdown.is_over(Share.REDO)
        return shutdown.reason is not None and not is_owing

    def _observe(self, generation: NodeGeneration, view: GroupView) -> Observation:
        """What a decision depends on. view: the newest answer of the group."""
        parts, workers = self._parts, generation.workers
        settings, shutdown, watchdog = parts.settings, parts.shutdown, parts.watchdog
        return Observation(
            workers=settings.nproc,
            exits=tuple(
                WorkerExit(rank=rank, code=code, open_step=workers.open_steps[rank])
                for rank, code in workers.exit_codes.items()
            ),
            first_exit_age_s=workers.first_exit_age_s(),
            not_started=None if workers.not_started is None else workers.not_started.message,
            knows_difference=EXIT_DIVERGED in workers.exit_codes.values()
            and generation.divergence is not None,
            is_done=generation.is_done,
            keep_alive_s=settings.options.keep_alive_s,
            hung=watchdog.hung,
            stacks_dumped=watchdog.error is not None,
            group_ended=None if view.ended is None else view.ended.reason,
            fenced=view.fenced,
            closed=None if view.open else view.cause,
            newcomers=parts.group.admits(view),
            leaving=shutdown.reason,
            drain_is_over=shutdown.is_over(self.workers_share),
            is_plain=not settings.imports_library,
            has_begun=parts.has_begun or self._owed_step > 0,
            drain_requested=generation.drain_requested,
            has_drain=parts.page.drain,
        )

    def _settle_divergence(self) -> None:
        """The workers agree again: forget the difference, and count it if it was this node's.

        A machine that is wrong for the second time leaves for good, as on a request.
        """
        parts, known = self._parts, self._divergence
        settled, parts.page.settled = parts.page.settled, Settled.NOT
        if settled is Settled.NOT or known is None:
            return
        self._divergence = None
        if settled is Settled.ELSEWHERE:
            return
        self._wrong_steps.append(known.step)
        if len(self._wrong_steps) < WRONG_TIMES_TO_LEAVE:
            parts.console.print_line(
                f"this node computed something else at step {known.step}; if it does once more, it leaves the group for good"
            )
            return
        steps = " and ".join(map(str, self._wrong_steps))
        parts.shutdown.ban(
            f"this node was wrong at steps {steps} and leaves the group for good: test its memory and processors, or replace it"
        )

    @property
    def _leaving_code(self) -> int:
        is_faulty = len(self._wrong_steps) >= WRONG_TIMES_TO_LEAVE
        return EXIT_FAILED if is_faulty else EXIT_INTERRUPTED

    def _count(self, failure: WorkerFailure | None) -> None:
        if failure is not None and not failure.from_outside:
            self._suspect_failures += 1

    # The workers of a generation: what torch's agent calls.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        parts, joins = self._parts, partial(super()._rendezvous, worker_group)
        parts.group.join(joins, meanwhile=parts.revive_uploader, share=self.workers_share)

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: Any
    ) -> list[Worker]:
        """Ranks follow from the generation; torch asks a store, which may die with its host."""
        first, size = self._entered.base_rank, self._entered.world_size
        return [
            Worker(local, global_rank=rank, role_rank=rank, world_size=size, role_world_size=size)
            for local, rank in enumerate(range(first, first + spec.local_world_size))
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Returns the pids by local rank."""
        parts, settings, entered = self._parts, self._parts.settings, self._entered
        # The uploader may be saving a state of the generation before. It learns first that this
        # node is in the new one, which then does not fence that save: workers may start slowly.
        parts.uploader.enter(entered.number)
        parts.log.generation = entered.number
        parts.faults.enter(entered)
        # The control page still has the steps of the generation before.
        is_state_awaited = parts.group.enter(entered, step=parts.step)
        self._earlier_step, self._has_trained = self.last_step, self.has_trained
        self._has_stepped = parts.step > parts.page.restored_step
        parts.shutdown.begins()
        parts.page.clear()
        parts.memory.publish()
        parts.watchdog.start_generation()
        if entered.cause != REHEARSAL:
            parts.console.print_line(
                f"generation {entered.number} ({entered.cause}): {entered.world_size} workers on {len(entered.members)} nodes"
            )
        if parts.group.is_first:
            nodes = [node.id for node in entered.members]
            size, cause, restarts = entered.world_size, entered.cause, entered.restarts
            plain = not settings.imports_library
            parts.log.record(
                GenerationStarted(world_size=size, nodes=nodes, cause=cause, restarts=restarts, plain=plain)
            )
        # The group counts all failures and starts from 0 at a new step; those that may lie in the
        # state are some of them.
        self._suspect_failures = min(self._suspect_failures, entered.restarts)
        with suppress(OSError):  # a full disk: a worker that fails then leaves its error in its log alone
            settings.error_folder(entered.number).mkdir(parents=True, exist_ok=True)
        starts = worker_starts(
            worker_group,
            settings,
            generation=entered.number,
            failures=self._suspect_failures,
            committed_step=entered.committed_step,
            divergence=self._divergence,
            control_page=parts.page.path,
            memory=parts.memory.path,
            uploader=parts.uploader.socket_path,
            is_rehearsal=entered.cause == REHEARSAL,
        )
        start, open_step = parts.spawner.start, parts.page.open_step
        workers = NodeWorkers(starts, start, open_step, parts.log, parts.console, parts.clock)
        is_second = entered.cause == REHEARSAL or (self._is_second_start and not self._has_stepped)
        self._is_second_start = is_second
        self._generation = NodeGeneration(parts, entered.number, workers, is_second_start=is_second)
        parts.health.generation = entered.number
        if is_state_awaited and parts.group.is_first:
            # A node that left waits until the state that it left behind is committed.
            parts.final_checkpoint.offer_newest()
        return {start.local_rank: workers.pid(rank) for rank, start in workers.running.items()}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Kill the workers that are left, if this node has any."""
        if self._generation is None:
            return
        self._parts.health.generation = None
        self._generation.kill_workers()
        self._settle_divergence()
        self._divergence = self._generation.divergence or self._divergence
        restarts = self._parts.settings.options.max_restarts
        self._raised = [*self._raised, self._generation.raised][-max(1, restarts) :]
        self.cut_short = self._generation.workers.was_cut_short
        self._generation = None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._stop_workers(self._worker_group)

    def _record_worker_events(self, result: RunResult) -> None:
        """Ours are recorded as things happen, with generations and victims, unlike torch's."""

    @property
    def _entered(self) -> Generation:
        """The generation that the last rendezvous formed with this node."""
        assert self._handler.generation is not None
        return self._handler.generation
