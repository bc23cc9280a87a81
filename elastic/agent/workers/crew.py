"""Every start and end of this node's workers becomes an event and a line on the console, and the first failure has a name.

It watches and kills the workers of one generation, which are started before; what their ends mean is decided elsewhere.
"""

import signal
from pathlib import Path

from elastic.agent.workers.first_failure import WorkerError, first_failure, is_from_outside, read_errors
from elastic.agent.workers.node_workers import Workers, WorkerStart
from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_PEER_LOST
from elastic.events import WorkerExited, WorkerFailed, WorkerStarted
from elastic.observe.console import ConsoleFollower
from elastic.observe.log import EventLog
from elastic.rendezvous.group import Failure
from elastic.system.clock import Clock


class Crew:
    def __init__(
        self,
        plans: list[WorkerStart],
        workers: Workers,
        log: EventLog,
        console: ConsoleFollower,
        clock: Clock,
    ) -> None:
        self._plans = {plan.rank: plan for plan in plans}
        self._workers = workers
        self._log = log
        self._console = console
        self._clock = clock
        self._first_end_s: float | None = None
        for plan in plans:
            log.record(WorkerStarted(rank=plan.rank, pid=workers.pids[plan.rank]))
            console.follow(plan.log, f"rank{plan.rank}")

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes by rank, of those that ended, in the order in which they were seen; minus the number of the signal that ended it."""
        return self._workers.codes

    @property
    def running(self) -> dict[int, WorkerStart]:
        """By rank, those whose end was not seen yet."""
        return {rank: plan for rank, plan in self._plans.items() if rank not in self.codes}

    def pid(self, rank: int) -> int:
        return self._workers.pids[rank]

    @property
    def cut_short(self) -> bool:
        """Whether a worker ended otherwise than by finishing or draining."""
        return any(code not in (EXIT_COMPLETE, EXIT_INTERRUPTED) for code in self.codes.values())

    def first_end_age_s(self) -> float:
        """Seconds since the first end was seen; 0 while all run."""
        return 0.0 if self._first_end_s is None else self._clock.monotonic() - self._first_end_s

    def poll(self) -> bool:
        """Whether a worker ended since the last look."""
        new = self._workers.poll()
        if new and self._first_end_s is None:
            self._first_end_s = self._clock.monotonic()
        for rank in new:
            self._tell_end(rank, victim=self.codes[rank] == EXIT_PEER_LOST)
        return bool(new)

    def wait(self, timeout_s: float) -> None:
        """Return as soon as a worker may have ended, or when the time is over."""
        self._workers.wait(timeout_s)

    def terminate(self) -> None:
        self._workers.terminate()

    def kill(self, culprit: WorkerError | None) -> None:
        """End whoever is left, with children; all are victims but the culprit, if one of them is."""
        self.poll()
        for rank in self._workers.kill():
            self._tell_end(rank, victim=culprit is None or rank != culprit.rank)

    def failure(self, node: str, reason: str, errors: Path, culprit: WorkerError | None) -> Failure:
        """Who failed first on this node, also as an event; `reason` speaks for a worker that left no word in the folder `errors`.

        culprit: one that was found before it ended, and is to blame whatever the others left.
        """
        told = read_errors(errors, list(self._workers.pids))
        first = culprit or first_failure(self.codes, self._workers.killed, told, reason)
        self._log.record(WorkerFailed(rank=first.rank, message=first.message, traceback=first.traceback))
        return Failure(
            node=node,
            rank=first.rank,
            message=first.message,
            traceback=first.traceback,
            from_outside=is_from_outside(self.codes, first.rank),
        )

    def _tell_end(self, rank: int, *, victim: bool) -> None:
        code, pid = self.codes[rank], self._workers.pids[rank]
        name = signal.Signals(-code).name if code < 0 else None
        self._log.record(
            WorkerExited(rank=rank, pid=pid, code=None if code < 0 else code, signal=name, victim=victim)
        )
        if code not in (EXIT_COMPLETE, EXIT_INTERRUPTED):
            how = f"killed by {name}" if name else f"exit code {code}"
            self._console.print_line(
                f"rank {rank} (pid {pid}) ended: {how}{', a victim of another failure' if victim else ''}"
            )
