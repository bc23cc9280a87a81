"""A node's workers of one generation start together, and every start and every exit is recorded.

Each worker leads a session of its own, so that a terminal's Ctrl-C does not reach it, and dies with
this agent. Its output goes straight into its log file: nothing is lost when the agent dies, and no
pipe can fill up. If that file cannot be created, the worker runs all the same, and what it prints
is kept in memory. Where a worker cannot be started, those after it are not. No worker is left
behind. What an exit means is decided in decide.py.
"""

import os
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.worker_process import Process, ProcessStart, kill_session, wait_any_exit
from elastic.errors import (
    EXIT_AGAIN,
    EXIT_COMPLETE,
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    CannotStart,
    shown_code,
)
from elastic.events import WorkerExited, WorkerFailed, WorkerStarted
from elastic.observe.console import ConsoleFollower
from elastic.observe.log import EventLog
from elastic.rendezvous.group import WorkerFailure
from elastic.system.clock import Clock
from elastic.system.files import make_folders
from elastic.system.processes import has_exited
from elastic.system.worker_error import WorkerError, read_errors

KILL_WAIT_S = 30.0
# For the fork server to report workers that have exited: one that is stopped or hangs never does.
# A node that leaves needs none any more.
REPORT_WAIT_S, LAST_REPORT_WAIT_S = 3.0, 0.5
TERMINATE_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    rank: int
    local_rank: int
    command: tuple[str, ...]  # the recipe and its arguments
    env: Mapping[str, str]
    log: Path
    is_plain: bool = False  # a script without this library, which may mean anything by its codes
    store_fd: int | None = None  # as in ProcessStart


class NodeWorkers:
    def __init__(
        self,
        starts: list[WorkerStart],
        start_process: Callable[[ProcessStart], Process],
        open_step: Callable[[int], int | None],
        log: EventLog,
        console: ConsoleFollower,
        clock: Clock,
    ) -> None:
        """Start the workers, or all before one that cannot be started: `not_started` says why.

        open_step: in which step of its loop a local rank is, if in any.
        """
        # By rank, in the order in which the exits were seen. A negative code is the number of the
        # signal that ended the worker.
        self.exit_codes: dict[int, int] = {}
        self.open_steps: dict[int, int | None] = {}  # of those, when they ended
        self.killed: set[int] = set()  # ranks that this agent killed
        self.not_started: WorkerError | None = None
        self._open_step = open_step
        self._log = log
        self._console = console
        self._clock = clock
        self._first_exit_s: float | None = None
        self._processes: dict[int, Process] = {}
        for start in starts:
            try:
                self._processes[start.rank] = self._start(start, start_process)
            except (CannotStart, OSError) as error:
                message = f"the worker of rank {start.rank} was not started: {error}"
                self.not_started = WorkerError(rank=start.rank, message=message, traceback="", time=0.0)
                break
        self._starts = {start.rank: start for start in starts if start.rank in self._processes}
        for start in self._starts.values():
            log.record(WorkerStarted(rank=start.rank, pid=self.pid(start.rank)))
            console.follow(start.log, f"rank{start.rank}")

    @property
    def running(self) -> dict[int, WorkerStart]:
        """By rank, the workers whose exit was not seen yet."""
        return {rank: start for rank, start in self._starts.items() if rank not in self.exit_codes}

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    @property
    def was_cut_short(self) -> bool:
        """Whether a worker exited otherwise than by finishing or draining."""
        codes = self.exit_codes.values()
        return bool(self.ended_within) or any(code not in (EXIT_COMPLETE, EXIT_INTERRUPTED) for code in codes)

    @property
    def ended_within(self) -> set[int]:
        """Ranks that ended with exit code 0 before their loop had ended."""
        return {
            rank
            for rank, step in self.open_steps.items()
            if step is not None and self.exit_codes[rank] == EXIT_COMPLETE
        }

    def first_exit_age_s(self) -> float:
        """Seconds since the first exit was seen; 0 while all run."""
        return 0.0 if self._first_exit_s is None else self._clock.monotonic() - self._first_exit_s

    def poll(self, culprit: WorkerError | None = None) -> bool:
        """Take note of new exits; returns whether there were any.

        A worker that lost a peer or that this agent killed is a victim, unless it is the culprit.
        """
        codes = {rank: code for rank in self.running if (code := self._processes[rank].poll()) is not None}
        self.exit_codes.update(codes)
        self.open_steps |= {rank: self._open_step(self._starts[rank].local_rank) for rank in codes}
        if codes and self._first_exit_s is None:
            self._first_exit_s = self._clock.monotonic()
        for rank, code in codes.items():
            is_victim = code == EXIT_PEER_LOST or rank in self.killed
            self._record_exit(rank, code, victim=is_victim and (culprit is None or rank != culprit.rank))
        return bool(codes)

    def wait(self, timeout_s: float) -> None:
        """Return as soon as a worker may have exited, or after `timeout_s`."""
        running = [self._processes[rank] for rank in self.running]
        # The fork server reports all exits over one socket, and this one may have been read already
        # together with another message: the descriptor then stays silent although an exit is known.
        if all(process.poll() is None for process in running):
            wait_any_exit(running, timeout_s)

    def terminate(self, limit_s: float, is_over: Callable[[], bool]) -> None:
        """SIGTERM to the main process of each worker, which may save what it has.

        Returns once all workers have exited, after `limit_s`, or when `is_over` becomes true.
        """
        deadline = self._clock.monotonic() + limit_s
        self.poll()
        self.killed.update(self.running)
        for rank in self.running:
            if self._processes[rank].poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(self.pid(rank), signal.SIGTERM)
        while self.running and self._clock.monotonic() < deadline and not is_over():
            self.wait(TERMINATE_POLL_S)
            self.poll()

    def kill(
        self, culprit: WorkerError | None, *, is_last: bool = False, within_s: float = KILL_WAIT_S
    ) -> None:
        """SIGKILL to every worker and its children; returns once all workers have exited.

        Call it once: then their numbers may be given to other processes. is_last: no workers of
        this node follow. within_s: then the parent of one that is still there is killed as well.
        """
        self.poll()
        self.killed.update(self.running)
        for process in self._processes.values():
            kill_session(process)
        began_s, report_s = self._clock.monotonic(), LAST_REPORT_WAIT_S if is_last else REPORT_WAIT_S
        while self.running:
            self.wait(LAST_REPORT_WAIT_S)
            self.poll(culprit)
            waited_s = self._clock.monotonic() - began_s
            for process in [self._processes[rank] for rank in self.running]:
                is_unreported = waited_s >= report_s and has_exited(process.pid)
                if waited_s >= within_s or is_unreported:
                    process.kill_parent()
        for process in self._processes.values():
            process.forget()

    def record_failure(self, node: str, reason: str, errors: Path, hung: WorkerError | None) -> WorkerFailure:
        """Which worker of this node failed first, also as an event.

        reason: speaks for a worker that left no error file in the folder `errors`. hung: a
        worker that was found to hang; it is to blame whatever error files the others left.
        """
        files = read_errors(errors, list(self._processes))
        first = (
            hung
            or self.not_started
            or first_failure(self.exit_codes, self.killed, files, reason, self.ended_within)
        )
        self._log.record(WorkerFailed(rank=first.rank, message=first.message, traceback=first.traceback))
        return WorkerFailure(
            node=node,
            rank=first.rank,
            message=first.message,
            traceback=first.traceback,
            from_outside=first is self.not_started or was_sigkilled(self.exit_codes, first.rank),
        )

    def _record_exit(self, rank: int, code: int, *, victim: bool) -> None:
        pid = self.pid(rank)
        name = signal.Signals(-code).name if code < 0 else None
        is_plain = self._starts[rank].is_plain
        is_planned = code in (EXIT_COMPLETE, EXIT_INTERRUPTED) or (code == EXIT_AGAIN and not is_plain)
        code = code if is_plain else shown_code(code)
        self._log.record(
            WorkerExited(rank=rank, pid=pid, code=None if code < 0 else code, signal=name, victim=victim)
        )
        if not is_planned or rank in self.ended_within:
            how = f"killed by {name}" if name else f"exit code {code}"
            why = ", stopped by this agent" if rank in self.killed else ", a victim of another failure"
            self._console.print_line(f"rank {rank} (pid {pid}) ended: {how}{why if victim else ''}")

    def _start(self, start: WorkerStart, start_process: Callable[[ProcessStart], Process]) -> Process:
        try:
            make_folders(start.log.parent)
            # Exclusively: a log belongs to one worker of one generation and is never overwritten.
            log = start.log.open("xb")
        except OSError as error:
            # A full disk costs the log, and never the training.
            self._console.print_line(f"rank {start.rank} runs without a log ({error}): its output is lost")
            log = Path(os.devnull).open("wb")  # noqa: SIM115 - closed below
        with log:
            return start_process(
                ProcessStart(
                    command=start.command,
                    env=start.env,
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                    store_fd=start.store_fd,
                )
            )


def first_failure(
    codes: Mapping[int, int],
    killed: set[int],
    errors: list[WorkerError],
    reason: str,
    ended_within: Collection[int] = (),
) -> WorkerError:
    """The worker to blame for the end of a generation on this node.

    codes: exit codes by rank, in the order in which the agent saw them.
    killed: ranks that the agent itself killed.
    reason: speaks for a culprit that left no error file, as one that was killed from outside.
    ended_within: ranks whose exit code 0 was no end of their loop.
    """
    culprits = [
        rank
        for rank, code in codes.items()
        if rank not in killed
        and (rank in ended_within or code not in (EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST))
    ]
    of_culprits = [error for error in errors if error.rank in culprits]
    # A worker writes its error file, then its sockets close, and only later its exit code is seen.
    # A victim may notice the closed socket and exit before the culprit has: so workers that have
    # written a file and not exited yet are candidates as well, and the earliest file decides.
    of_running = [error for error in errors if error.rank not in codes]
    if of_culprits:
        return min([*of_culprits, *of_running], key=lambda error: error.time)
    if errors and not culprits:
        return min(of_running or errors, key=lambda error: error.time)
    first = culprits[0] if culprits else next(iter(codes), -1)
    return WorkerError(rank=first, message=reason, traceback="", time=0.0)


def was_sigkilled(codes: Mapping[int, int], rank: int) -> bool:
    """Whether SIGKILL ended the worker.

    It comes from outside or for want of memory, so the training state cannot be at fault.
    """
    return codes.get(rank) == -signal.SIGKILL
