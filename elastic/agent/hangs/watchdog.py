"""At most one worker of a node is called hung in a generation, and it shows its stacks first.

The watchdog samples heartbeats and processes, and hang_detector.py judges the samples. What follows
is decided in decide.py. It is not polled where nothing sends heartbeats (a script that does not
import this library), nor with `--hang-timeout off`.
"""

from elastic.agent.hangs.hang_detector import HangDetector, HungWorker, WorkerSample
from elastic.agent.hangs.stack_dump import dump_stacks
from elastic.agent.workers.node_workers import NodeWorkers
from elastic.events import HangDetected
from elastic.observe.log import EventLog
from elastic.system.clock import Clock, since_boot_s
from elastic.system.control_page import ControlPage
from elastic.system.processes import is_stopped
from elastic.system.worker_error import WorkerError

POLL_EVERY_S = 0.2  # limits are seconds long, and a sample of a worker reads a file of /proc


class Watchdog:
    def __init__(self, detector: HangDetector, page: ControlPage, log: EventLog, clock: Clock) -> None:
        self._detector = detector
        self._page = page
        self._log = log
        self._clock = clock
        self._polled_s = 0.0
        self.hung: HungWorker | None = None
        self.error: WorkerError | None = None  # of the hung worker, with its stacks

    def start_generation(self) -> None:
        self._detector = self._detector.for_new_generation()
        self.hung = self.error = None

    def poll(self, workers: NodeWorkers) -> None:
        now_s = self._clock.monotonic()
        if self.hung is not None or now_s - self._polled_s < POLL_EVERY_S:
            return
        self._polled_s = now_s
        samples = {}
        for rank, start in workers.running.items():
            heartbeat = self._page.heartbeat(start.local_rank)
            samples[rank] = WorkerSample(
                step=heartbeat.step,
                phase=heartbeat.phase,
                beats=heartbeat.beats,
                is_stopped=is_stopped(workers.pid(rank)),
            )
        self._detector = self._detector.observe(samples, now_s=now_s)
        self.hung = self._detector.hung

    def record_hang(self, workers: NodeWorkers) -> None:
        """Record the hung worker, and have it write its stacks into its log."""
        hung = self.hung
        assert hung is not None
        self._log.record(
            HangDetected(
                rank=hung.rank,
                place=hung.phase.name.lower(),
                silence_s=hung.silence_s,
                limit_s=hung.limit_s,
                reason=hung.reason,
            )
        )
        start = workers.running.get(hung.rank)
        stacks = ""
        if start is not None:
            stacks = dump_stacks(workers.pid(hung.rank), start.log, self._clock)
        self.error = WorkerError(rank=hung.rank, message=hung.reason, traceback=stacks, time=since_boot_s())
