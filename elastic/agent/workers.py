"""A node's workers of one generation start together, and every start and every exit is recorded.

Each worker leads a session of its own, so that a terminal's Ctrl-C does not reach it, and dies with
this agent. Its output goes straight into its log file: nothing is lost when the agent dies, and no
pipe can fill up. If that file cannot be created, the worker runs all the same, and what it prints
is lost. Where a worker cannot be started, those after it are not. No worker is left
behind. What an exit means is decided in decide.py.

A worker has torchrun's variables, so that a script written for torchrun runs unchanged.
`ELASTIC_AGENT` holds what this library's own workers need beside them (config/environment.py).
"""

import os
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.agent.decide import WorkerExit
from elastic.agent.parts import AgentParts, Settings
from elastic.agent.worker_process import Process
from elastic.config.environment import AGENT, ASSIGNMENT, AWAITED, RUN_DIR, STORE, AgentLink, variables
from elastic.divergence import Divergence
from elastic.errors import (
    EXIT_AGAIN,
    EXIT_COMPLETE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    CannotStart,
    shown_code,
)
from elastic.events import WorkerExited, WorkerFailed, WorkerStarted
from elastic.rendezvous.group import WorkerFailure
from elastic.rendezvous.rendezvous import Generation
from elastic.rendezvous.transitions import REHEARSAL
from elastic.system.files import make_folders
from elastic.system.processes import signal_name
from elastic.system.worker_protocol import StartRequest, WorkerError, read_errors

KILL_WAIT_S = 30.0
END_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class WorkerStart:
    rank: int
    local_rank: int
    request: StartRequest
    assignment: dict[str, str]  # the part of its environment that a standby awaits
    log: Path
    store: tuple[int, ...] = ()  # the listening socket of the generation's store, if it serves that


class NodeWorkers:
    def __init__(
        self,
        starts: list[WorkerStart],
        parts: AgentParts,
        standby_of: Callable[[WorkerStart], Process | None],
    ) -> None:
        """Start them, up to the first that cannot be started; that one counts as failed.

        standby_of: gives a worker's assignment to a standby, if one waits.
        """
        self.of_standbys: set[int] = set()  # ranks
        self.exits: dict[int, WorkerExit] = {}  # by rank, in the order in which they were seen
        self.killed: set[int] = set()  # ranks that this agent killed
        self._not_started: WorkerError | None = None
        self._parts = parts
        self._first_exit_s: float | None = None
        self._processes: dict[int, Process] = {}
        for start in starts:
            try:
                if (process := standby_of(start)) is not None:
                    self.of_standbys.add(start.rank)
                self._processes[start.rank] = process or self._start(start)
            except (CannotStart, OSError) as error:
                message = f"the worker of rank {start.rank} was not started: {error}"
                parts.console.print_line(message)
                self._not_started = WorkerError(rank=start.rank, message=message, traceback="", time=0.0)
                self.exits[start.rank] = WorkerExit(rank=start.rank, code=EXIT_FAILED)
                break
        self._starts = {start.rank: start for start in starts if start.rank in self._processes}
        for start in self._starts.values():
            standby = start.rank in self.of_standbys
            parts.log.record(WorkerStarted(rank=start.rank, pid=self.pid(start.rank), standby=standby))
            parts.console.follow(start.log, f"rank{start.rank}")

    @property
    def running(self) -> dict[int, WorkerStart]:
        """By rank, the workers whose exit was not seen yet."""
        return {rank: start for rank, start in self._starts.items() if rank not in self.exits}

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    @property
    def was_cut_short(self) -> bool:
        """Whether a worker exited otherwise than by finishing or draining."""
        ends_well = EXIT_COMPLETE, EXIT_INTERRUPTED
        return any(each.is_within_loop or each.code not in ends_well for each in self.exits.values())

    def first_exit_age_s(self) -> float:
        """Seconds since the first exit was seen; 0 while all run."""
        return 0.0 if self._first_exit_s is None else self._parts.clock.monotonic() - self._first_exit_s

    def poll(self, culprit: WorkerError | None = None) -> bool:
        """Take note of new exits; returns whether there were any.

        A worker that lost a peer or that this agent killed is a victim, unless it is the culprit.
        """
        found = [
            WorkerExit(rank=rank, code=code, open_step=self._parts.page.open_step(start.local_rank))
            for rank, start in self.running.items()
            if (code := self._processes[rank].poll()) is not None
        ]
        self.exits |= {each.rank: each for each in found}
        if found and self._first_exit_s is None:
            self._first_exit_s = self._parts.clock.monotonic()
        for each in found:
            is_victim = each.code == EXIT_PEER_LOST or each.rank in self.killed
            self._record_exit(each, victim=is_victim and (culprit is None or each.rank != culprit.rank))
        return bool(found)

    def wait(self, timeout_s: float) -> None:
        """Return as soon as a worker may have exited, or after `timeout_s`."""
        # The fork server reports all exits over one socket, and this one may have been read already
        # together with another message: the socket then stays silent although an exit is known.
        if all(self._processes[rank].poll() is None for rank in self.running):
            self._parts.spawner.wait(timeout_s)

    def terminate(self, limit_s: float, is_over: Callable[[], bool]) -> None:
        """SIGTERM to the main process of each worker, which may save what it has.

        Returns once all workers have exited, after `limit_s`, or when `is_over` becomes true.
        """
        deadline = self._parts.clock.monotonic() + limit_s
        self.poll()
        self.killed.update(self.running)
        for rank in self.running:
            self._processes[rank].send_signal(signal.SIGTERM)
        while self.running and self._parts.clock.monotonic() < deadline and not is_over():
            self.wait(END_POLL_S)
            self.poll()

    def kill(self, culprit: WorkerError | None, *, within_s: float = KILL_WAIT_S) -> None:
        """SIGKILL to every worker and its children; returns once all workers have exited.

        within_s: without a report of their exits by then, the fork server is killed as well: it is
        stopped, or a device or a file system holds a worker.
        """
        self.poll()
        self.killed.update(self.running)
        for process in self._processes.values():
            process.kill()
        deadline = self._parts.clock.monotonic() + within_s
        while self.running:
            self.wait(END_POLL_S)
            self.poll(culprit)
            if self._parts.clock.monotonic() >= deadline:
                self._parts.spawner.kill()

    def record_failure(self, reason: str, generation: int, hung: WorkerError | None) -> WorkerFailure:
        """Which worker of this node failed first, also as an event.

        reason: speaks for a worker that left no error file. hung: a worker that was found to hang;
        it is to blame whatever error files the others left.
        """
        settings = self._parts.settings
        files = read_errors(settings.error_folder(generation), list(self._processes))
        first = hung or self._not_started or first_failure(self.exits.values(), self.killed, files, reason)
        failed = WorkerFailed(rank=first.rank, message=first.message, traceback=first.traceback)
        self._parts.log.record(failed)
        return WorkerFailure(
            node=settings.node,
            rank=first.rank,
            message=first.message,
            traceback=first.traceback,
        )

    def _record_exit(self, seen: WorkerExit, *, victim: bool) -> None:
        rank, code, pid = seen.rank, seen.code, self.pid(seen.rank)
        name = signal_name(-code) if code < 0 else None
        is_plain = not self._parts.settings.imports_library  # its codes may mean anything
        is_planned = code in (EXIT_COMPLETE, EXIT_INTERRUPTED) or (code == EXIT_AGAIN and not is_plain)
        code = code if is_plain else shown_code(code)
        self._parts.log.record(
            WorkerExited(rank=rank, pid=pid, code=None if code < 0 else code, signal=name, victim=victim)
        )
        if not is_planned or seen.is_within_loop:
            how = f"killed by {name}" if name else f"exit code {code}"
            why = ", stopped by this agent" if rank in self.killed else ", a victim of another failure"
            self._parts.console.print_line(f"rank {rank} (pid {pid}) ended: {how}{why if victim else ''}")

    def _start(self, start: WorkerStart) -> Process:
        try:
            make_folders(start.log.parent)
            # Exclusively: a log belongs to one worker of one generation and is never overwritten.
            log = start.log.open("xb")
        except OSError as error:
            # A full disk costs the log, and never the training.
            self._parts.console.print_line(
                f"rank {start.rank} runs without a log ({error}): its output is lost"
            )
            log = Path(os.devnull).open("wb")  # noqa: SIM115 - closed below
        with log:
            return self._parts.spawner.start(start.request, log.fileno(), log.fileno(), *start.store)


def first_failure(
    exits: Iterable[WorkerExit], killed: set[int], errors: list[WorkerError], reason: str
) -> WorkerError:
    """The worker to blame for the end of a generation on this node.

    exits: in the order in which the agent saw them. killed: ranks that the agent itself killed.
    reason: speaks for a culprit that left no error file, as after a SIGKILL from outside.
    """
    ended = {each.rank: each for each in exits}
    no_failure = EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST
    culprits = [
        rank
        for rank, each in ended.items()
        if rank not in killed and (each.is_within_loop or each.code not in no_failure)
    ]
    of_culprits = [error for error in errors if error.rank in culprits]
    # A worker writes its error file, then its sockets close, and only later its exit code is seen.
    # A victim may notice the closed socket and exit before the culprit has: so workers that have
    # written a file and not exited yet are candidates as well, and the earliest file decides.
    of_running = [error for error in errors if error.rank not in ended]
    if of_culprits:
        return min([*of_culprits, *of_running], key=lambda error: error.time)
    if errors and not culprits:
        return min(of_running or errors, key=lambda error: error.time)
    first = next(iter([*culprits, *ended]), -1)
    return WorkerError(rank=first, message=reason, traceback="", time=0.0)


# How to start the workers of a generation.


def worker_starts(
    entered: Generation,
    parts: AgentParts,
    store: socket.socket | None,
    *,
    divergence: Divergence | None,
) -> list[WorkerStart]:
    """How to start each worker of a generation. store: the socket that the first of them serves.

    divergence: because of which they do steps again.
    """
    settings, options = parts.settings, parts.settings.options
    link = AgentLink(
        pid=os.getpid(),
        node=settings.node,
        generation=entered.number,
        control_page=parts.page.path,
        uploader=parts.uploader.socket_path,
        options=replace(options, recipe_args=()),
        memory=parts.memory.path,
        committed_step=entered.committed_step,
        divergence=divergence,
        error_folder=str(settings.error_folder(entered.number)),
        parent=None if settings.declared is None else settings.declared.parent,
        imports_library=settings.imports_library,
        disturbs=entered.cause == REHEARSAL,
        evidence=str(settings.evidence) if settings.does_steps_again else "",
    )
    host, port = entered.endpoint.rsplit(":", 1)
    if not settings.imports_library:  # rank 0 of such a script opens the store itself
        host = entered.members[0].address
    starts = []
    for local_rank in range(settings.nproc):
        rank = entered.base_rank + local_rank
        served = () if store is None or local_rank else (store.fileno(),)
        # Restarts of any kind, so that all nodes have the same number: torch's own count, of
        # failures on one node, differs between nodes.
        node, nodes, restarts = entered.rank_of_node, len(entered.members), entered.number - 1
        numbers = (rank, rank, entered.world_size, entered.world_size, node, nodes, host, port, restarts)
        assignment = dict(zip(_ASSIGNED, map(str, numbers), strict=True)) | link.to_env()
        assignment |= {STORE: ""} if served else {}
        request = _request(settings, local_rank, assignment, (STORE,) if served else ())
        log = settings.run.log(generation=entered.number, rank=rank)
        starts.append(WorkerStart(rank, local_rank, request, assignment, log, served))
    return starts


def standby_request(settings: Settings, local_rank: int) -> StartRequest:
    """For a process whose assignment comes later."""
    return _request(settings, local_rank, dict.fromkeys((*_ASSIGNED, AGENT), AWAITED), (ASSIGNMENT,))


# The variables of torchrun that differ between generations.
_RANKS = ("RANK", "ROLE_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_ASSIGNED = (*_RANKS, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")


def _request(
    settings: Settings, local_rank: int, assignment: dict[str, str], passes: tuple[str, ...]
) -> StartRequest:
    options = settings.options
    own = {
        RUN_DIR: settings.run.url,
        ASSIGNMENT: "",  # an agent that a worker started has inherited one
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(settings.nproc),
        "ROLE_NAME": "default",
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": options.rdzv_id or settings.run.local.name,
        "TORCHELASTIC_USE_AGENT_STORE": str(settings.imports_library),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": variables().get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    command = options.recipe, *options.recipe_args
    return StartRequest(command=command, env=variables() | own | assignment, passes=passes)
