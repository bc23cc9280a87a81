"""One node's supervisor: it starts the workers of each generation, sees how they end, and does what decide.py decides.

A subclass of torch's LocalElasticAgent: rendezvous and rank bookkeeping are torch's interfaces, the processes and the state machine are ours (the
reasons stand in docs/decisions/0002). It never blocks on a worker, and leaves none behind.
"""

import signal
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from elastic.agent.decide import Action, Decision, Observation, WorkerExit, decide
from elastic.agent.fault_injection import NodeFaults, Targets
from elastic.agent.final_checkpoint import FinalCheckpoint
from elastic.agent.hangs.watchdog import Watchdog
from elastic.agent.peers import Peers
from elastic.agent.settings import Settings
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.agent.snapshot_memory import SLOTS, SLOTS_WITHOUT_SNAPSHOTS, SnapshotMemory
from elastic.agent.workers.environment import worker_starts
from elastic.agent.workers.first_failure import WorkerError
from elastic.agent.workers.node_workers import NodeWorkers
from elastic.agent.workers.spawner import Spawner
from elastic.checkpoint.record import CommitRecord
from elastic.errors import (
    EXIT_COMPLETE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    ElasticError,
    GroupEnded,
    Interrupted,
    RendezvousTimeout,
)
from elastic.events import DrainRequested, GenerationEnded, GenerationStarted
from elastic.observe.console import ConsoleFollower
from elastic.observe.log import EventLog
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group import Failure, RunEnd
from elastic.rendezvous.rendezvous import Generation, GroupView, Rendezvous
from elastic.rendezvous.torch_handler import ElasticRendezvous
from elastic.rendezvous.transitions import NODE_JOINED, NODE_LEFT
from elastic.storage.remote import open_store
from elastic.system.clock import Clock
from elastic.system.control_page import ControlPage
from elastic.uploader.client import UploaderProcess

WORKER_POLL_S = 0.02
GROUP_POLL_S = 0.025


class NodeAgent(LocalElasticAgent):
    def __init__(  # noqa: PLR0913 - the one object where a node's parts meet
        self,
        spec: Any,
        logs_specs: Any,
        *,
        settings: Settings,
        rendezvous: Rendezvous,
        leaving: ShutdownRequest,
        spawner: Spawner,
        uploader: UploaderProcess,
        console: ConsoleFollower,
        log: EventLog,
        clock: Clock,
    ) -> None:
        super().__init__(spec=spec, logs_specs=logs_specs)
        self.exit_code = EXIT_FAILED
        self.verdict = ""
        self.failure: Failure | None = None
        self._settings = settings
        self._spawner = spawner
        self._uploader = uploader
        self._console = console
        self._log = log
        self._clock = clock
        self._page = ControlPage.create()
        is_off = settings.snapshot_every == "off"
        self._memory = SnapshotMemory(
            self._page, SLOTS_WITHOUT_SNAPSHOTS if is_off else SLOTS, console.print_line
        )
        self._final_checkpoint = FinalCheckpoint(
            self._memory,
            open_store(settings.run.checkpoints_url),
            run_id=settings.run_id,
            uploader_socket=settings.uploader_socket,
            clock=clock,
            say=console.print_line,
        )
        self._vigil = (
            None if settings.silences is None else Watchdog(settings.silences, self._page, log, clock)
        )
        self._faults = NodeFaults.of(settings, log, clock)
        self._peers = Peers(rendezvous, console.print_line, clock)
        self._leaving = leaving
        self.last_step = 0
        self.cut_short = False
        self._started: NodeWorkers | None = None
        self._drain_asked = False
        self._is_done = False
        self._blamed = 0  # of the consecutive failures without a new step, those that may lie in the state

    @property
    def is_first(self) -> bool:
        """Whether rank 0 ran on this node in the last generation."""
        return self._peers.is_first

    def newest_checkpoint(self) -> CommitRecord | None:
        return self._final_checkpoint.newest_checkpoint() if self.uses_library else None

    @property
    def uses_library(self) -> bool:
        return self._settings.uses_library

    # What torch's agent calls.

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: Any
    ) -> list[Worker]:
        """Ranks follow from the generation itself; torch's way asks a store that may hang with its host."""
        generation = self._handler.generation
        assert generation is not None
        return [
            Worker(
                local_rank=local_rank,
                global_rank=generation.base_rank + local_rank,
                role_rank=generation.base_rank + local_rank,
                world_size=generation.world_size,
                role_world_size=generation.world_size,
            )
            for local_rank in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        generation = self._handler.generation
        assert generation is not None
        self._log.generation = generation.number
        if self._faults is not None:
            self._faults.enter(generation)
        somebody_left = self._peers.enter(generation, step=self._step)
        self._page.clear()
        self._memory.show()
        self._drain_asked = self._is_done = False
        if self._vigil is not None:
            self._vigil.begin()
        self._tell_start(generation)
        self._blamed = min(self._blamed, generation.restarts)
        self._errors.mkdir(parents=True, exist_ok=True)
        starts = worker_starts(
            worker_group,
            self._settings,
            generation=generation.number,
            failures=self._blamed,
            control_page=self._page.path,
            memory=self._memory.path,
            errors=self._errors,
        )
        workers = NodeWorkers(starts, self._spawner.start, self._log, self._console, self._clock)
        self._started = workers
        # While they start: what the uploader has in hand of the generation before is not fenced by this one.
        self._uploader.enter(generation.number)
        if somebody_left and self.is_first:
            # It waits for a checkpoint of the state that it left behind.
            self._final_checkpoint.offer_newest()
        return {start.local_rank: workers.pid(start.rank) for start in starts}

    def _tell_start(self, generation: Generation) -> None:
        self._console.print_line(
            f"generation {generation.number} ({generation.cause}): {generation.world_size} workers on {len(generation.members)} nodes"
        )
        if self.is_first:
            self._log.record(
                GenerationStarted(
                    world_size=generation.world_size,
                    nodes=[node.id for node in generation.members],
                    cause=generation.cause,
                    restarts=generation.restarts,
                )
            )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Kill: what counts is in memory, where a save that is under way finds it too."""
        if self._started is None:
            return
        self._kill_workers()
        self._started = None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._stop_workers(self._worker_group)

    def _record_worker_events(self, result: RunResult) -> None:
        """Not through torch's records, which know neither generations nor victims: our events are written as things happen."""

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        while True:
            # Before the meeting: whoever comes anew with imports still to do would keep all others waiting in an open generation.
            self._spawner.renew()
            try:
                self._initialize_workers(group)
                result = self._watch_generation()
            except Interrupted as interrupted:
                self._secure(others=interrupted.others)
                return self._end(EXIT_INTERRUPTED, f"{self._leaving.reason} while it waited for the group")
            except GroupEnded as ended:
                return self._end(ended.exit_code, str(ended))
            except RendezvousTimeout as error:
                self._secure(others=False)
                return self._end(error.exit_code, str(error))
            except BackendFailed as error:
                self._secure(others=False)
                return self._end(EXIT_INTERRUPTED, str(error))
            except ElasticError as error:
                # The shared state is damaged, say: what can still be ended here is ended by torch's agent, which calls _shutdown.
                return self._end(error.exit_code, str(error))
            if result is not None:
                return result
            self._stop_workers(group)

    # The loop of one generation.

    def _watch_generation(self) -> RunResult | None:
        """Watch until something is decided that ends this generation here; None: meet the others again."""
        watch: GroupView | None = None
        looked_s = 0.0
        while True:
            if self._clock.monotonic() - looked_s >= GROUP_POLL_S or self._workers.poll():
                watch = self._look() or watch
                looked_s = self._clock.monotonic()
            decision = decide(self._observe(watch))
            match decision.action:
                case Action.CONTINUE:
                    self._workers.wait(WORKER_POLL_S)
                case Action.REQUEST_DRAIN:
                    self._ask_drain(decision.reason)
                case Action.REPORT_DONE:
                    self._report_done()
                case Action.REJOIN:
                    if watch is not None and watch.failure is not None:
                        self._blamed += not watch.failure.from_outside
                    self._end_generation(decision.reason)
                    return None
                case Action.CLOSE_AND_REJOIN:
                    self._peers.close(self._why_drained(watch), step=self._step, counts=False)
                    self._end_generation(decision.reason)
                    return None
                case Action.DUMP_STACKS:
                    self._show_stacks(decision.reason)
                case Action.FAIL:
                    return self._fail(decision)
                case Action.END_RUN:
                    return self._end_for_all(decision)
                case Action.LEAVE:
                    return self._leave(decision)
                case Action.STOP:
                    assert watch is not None
                    assert watch.ended is not None
                    self.failure = watch.failure
                    return self._end(watch.ended.exit_code, watch.ended.reason)

    def _look(self) -> GroupView | None:
        """At everything that stands around the workers; None when the rendezvous did not answer."""
        self._memory.serve()
        if self._vigil is not None:
            self._vigil.look(self._workers)
        if self._faults is not None:
            workers = {rank: self._workers.pid(rank) for rank in self._workers.running}
            self._faults.poll(
                self._all_finished, Targets(workers, self._uploader.pid, self._spawner.fork_server_pid)
            )
        if self._uploader.revive():
            self._memory.release_leases()
            self._console.print_line(
                "the uploader died and was started anew; a save that was under way is lost, training goes on"
            )
        return self._peers.poll(step=self._step, is_idle=not self._workers.running)

    def _observe(self, watch: GroupView | None) -> Observation:
        return Observation(
            workers=self._worker_group.spec.local_world_size,
            exits=tuple(WorkerExit(rank=rank, code=code) for rank, code in self._workers.exit_codes.items()),
            first_exit_age_s=self._workers.first_exit_age_s(),
            keep_alive_s=self._settings.keep_alive_s,
            hung=self._vigil.hung if self._vigil is not None else None,
            stacks_dumped=self._culprit is not None,
            is_done=self._is_done,
            group_ended=watch.ended.reason if watch is not None and watch.ended is not None else None,
            fenced=watch is not None and watch.fenced,
            closed=watch.cause if watch is not None and not watch.open else None,
            newcomers=watch is not None and self._peers.lets_in(watch),
            leaving=self._leaving.reason,
            leaving_age_s=self._leaving.age_s,
            grace_s=self._leaving.grace_s,
            has_begun=self._step > 0 or not self._settings.uses_library,
            drain_requested=self._drain_asked,
            skips_drain=self._leaving.skips_drain,
        )

    # What decisions do.

    def _ask_drain(self, reason: str) -> None:
        self._drain_asked = True
        self._page.drain = True
        self._log.record(DrainRequested(reason=reason))
        self._console.print_line(f"{reason}: all workers finish the same step and save it")
        if not self._settings.uses_library:
            # A script that knows nothing of the control page is asked the way torchrun asks.
            self._workers.terminate()

    def _show_stacks(self, reason: str) -> None:
        assert self._vigil is not None
        self._console.print_line(f"{reason}; its log has the stacks of its threads")
        self._vigil.hear(self._workers)

    def _report_done(self) -> None:
        self._is_done = self._peers.report_done()
        if not self._is_done:
            self._clock.sleep(GROUP_POLL_S)

    def _end_generation(self, cause: str) -> None:
        self._console.print_line(f"generation {self._log.generation} ends after step {self._step}: {cause}")
        self._log.record(GenerationEnded(cause=cause, step=self._step))

    def _fail(self, decision: Decision) -> RunResult | None:
        """Close the generation for everybody; ends the run when the restarts are used up."""
        self.failure = self._workers.record_failure(
            self._settings.node, decision.reason, self._errors, self._culprit
        )
        # First the word, then the deed: while own workers die, the others kill theirs.
        self._blamed += not self.failure.from_outside
        group = self._peers.close("failure", step=self._step, counts=True, failure=self.failure)
        self._kill_workers()
        self._end_generation(decision.reason)
        if group is None:
            # Nobody can be met, and perhaps nobody else is left: what this node has is made durable while it waits.
            self._console.print_line(
                "the rendezvous does not answer; the newest state is being saved, and this node waits for it"
            )
            if self._settings.uses_library:
                self._final_checkpoint.offer_newest()
            return None
        if group.generation != self._log.generation or group.restarts <= self._settings.max_restarts:
            return None
        reason = f"{decision.reason}; that was restart {group.restarts} of at most {self._settings.max_restarts} without a new step"
        self.failure = group.failure or self.failure
        self._peers.end(RunEnd(exit_code=EXIT_FAILED, reason=reason))
        return self._end(EXIT_FAILED, reason)

    def _end_for_all(self, decision: Decision) -> RunResult:
        self._kill_workers()
        self.failure = self._workers.record_failure(
            self._settings.node, decision.reason, self._errors, self._culprit
        )
        code = next(
            code for code in self._workers.exit_codes.values() if code not in (EXIT_COMPLETE, EXIT_PEER_LOST)
        )
        if self._peers.close("failure", step=self._step, counts=False, failure=self.failure) is not None:
            self._peers.end(RunEnd(exit_code=code, reason=self.failure.message))
        return self._end(code, self.failure.message)

    def _leave(self, decision: Decision) -> RunResult:
        self._stop_workers(self._worker_group)
        self._end_generation(decision.reason)
        # First leave, so that the others go on; what this node saves is fenced only once they have.
        self._secure(others=self._peers.leave())
        return self._end(EXIT_INTERRUPTED, decision.reason)

    def _secure(self, *, others: bool) -> None:
        """See the last state committed, here or by others, within the grace."""
        if self._settings.uses_library:
            deadline = self._leaving.deadline_s
            self._final_checkpoint.secure(
                others=others, deadline=deadline, is_over=lambda: self._leaving.skips_checkpoint
            )

    def _end(self, exit_code: int, verdict: str) -> RunResult:
        self.exit_code = exit_code
        self.verdict = verdict
        state = WorkerState.SUCCEEDED if exit_code == EXIT_COMPLETE else WorkerState.FAILED
        self._worker_group.state = state
        return RunResult(state=state)

    def _kill_workers(self) -> None:
        self.last_step = self._step
        self._workers.kill(self._culprit)
        self.cut_short = self._workers.was_cut_short

    # What is known.

    @property
    def _workers(self) -> NodeWorkers:
        assert self._started is not None
        return self._started

    @property
    def _culprit(self) -> WorkerError | None:
        """The worker of this generation that hangs, once it was heard."""
        return None if self._vigil is None else self._vigil.told

    @property
    def _handler(self) -> ElasticRendezvous:
        handler = self._worker_group.spec.rdzv_handler
        assert isinstance(handler, ElasticRendezvous)
        return handler

    @property
    def _step(self) -> int:
        """The last step that a worker of this node finished in this generation."""
        return max(self._page.step(i) for i in range(self._worker_group.spec.local_world_size))

    @property
    def _all_finished(self) -> int:
        """The last step that all workers of this node finished in this generation."""
        return min(self._page.step(i) for i in range(self._worker_group.spec.local_world_size))

    def _why_drained(self, watch: GroupView | None) -> str:
        return NODE_JOINED if watch is not None and watch.newcomers else NODE_LEFT

    @property
    def _errors(self) -> Path:
        return self._settings.errors / str(self._log.generation)
