"""At most one worker of a node is called hung in a generation, and it shows its stacks first.

The watchdog samples heartbeats and processes, and hang_detector.py judges the samples. What follows
is decided in decide.py. It is not polled where nothing sends heartbeats (a script that does not
import this library), nor with `--hang-timeout off`.

A worker registers faulthandler for SIGQUIT (worker/main.py), which writes the stacks from C, so it
works even if the main thread never returns to Python code. A worker that has not registered it yet
is ended by the signal, which does no harm: it is about to be killed anyway.
"""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.agent.hang_detector import HangDetector, WorkerSample
from elastic.agent.workers import NodeWorkers
from elastic.events import HangDetected
from elastic.observe.log import EventLog
from elastic.system.clock import Clock, since_boot_s
from elastic.system.control_page import ControlPage
from elastic.system.growing_file import read_from, size_bytes
from elastic.system.processes import is_stopped, signal_main_thread
from elastic.system.worker_protocol import WorkerError

POLL_S = 0.2  # limits are seconds long, and a sample of a worker reads a file of /proc
ANSWER_LIMIT_S = 1.0
ANSWER_POLL_S = 0.01
QUIET_POLLS = 5  # a dump that has not grown for so many polls is complete: faulthandler marks no end
OPENING = "most recent call first"  # in the first line of every thread's stack
DUMP_LIMIT_BYTES = 64 * 1024


@dataclass(slots=True)
class Watchdog:
    """error: of the hung worker, with its stacks."""

    detector: HangDetector
    page: ControlPage
    log: EventLog
    clock: Clock
    polled_s: float = 0.0
    hung: HangDetected | None = None
    error: WorkerError | None = None

    def start_generation(self) -> None:
        self.detector.workers.clear()
        self.hung = self.error = None

    def poll(self, workers: NodeWorkers) -> None:
        now_s = self.clock.monotonic()
        if self.hung is not None or now_s - self.polled_s < POLL_S:
            return
        self.polled_s = now_s
        samples = {
            rank: WorkerSample(self.page.heartbeat(start.local_rank), is_stopped(workers.pid(rank)))
            for rank, start in workers.running.items()
        }
        self.detector.observe(samples, now_s=now_s)
        self.hung = self.detector.hung

    def record_hang(self, workers: NodeWorkers) -> None:
        """Record the hung worker, and have it write its stacks into its log."""
        hung = self.hung
        assert hung is not None
        self.log.record(hung)
        start = workers.running.get(hung.rank)
        stacks = "" if start is None else dump_stacks(workers.pid(hung.rank), start.log, self.clock)
        self.error = WorkerError(rank=hung.rank, message=hung.reason, traceback=stacks, time=since_boot_s())


def dump_stacks(pid: int, log: Path, clock: Clock) -> str:
    """Signal the process, which writes to `log`; returns its stacks.

    Empty if none came in time, or the log cannot be read: there is none if the disk was full.
    """
    start = size_bytes(log)
    was_stopped = is_stopped(pid)
    with suppress(ProcessLookupError):
        # The handler runs in the thread that takes the signal. Another thread would dump all stacks
        # while the main thread goes on, and show the main thread where it is not stuck.
        signal_main_thread(pid, signal.SIGQUIT)
        if was_stopped:
            # A stopped process handles the signal only once it is continued.
            os.kill(pid, signal.SIGCONT)
    deadline = clock.monotonic() + ANSWER_LIMIT_S
    dump, quiet = "", 0
    while clock.monotonic() < deadline and quiet < QUIET_POLLS:
        clock.sleep(ANSWER_POLL_S)
        now = read_from(log, start, DUMP_LIMIT_BYTES).decode(errors="replace")
        quiet = quiet + 1 if now == dump and OPENING in now else 0
        dump = now
    return dump if OPENING in dump else ""
