"""Of the workers of one node at most one is accused of hanging, once a generation, and it is heard before it is killed.

It looks at pulses and processes and lets hang_detector.py judge; what follows from an accusation is decided in decide.py. Where nothing beats (a script without the library) or
hangs are to be waited out there is no vigil.
"""

from elastic.agent.hangs.hang_detector import HangDetector, Hung, WorkerSample
from elastic.agent.hangs.stack_dump import ask_for_stacks, is_stopped
from elastic.agent.workers.first_failure import WorkerError
from elastic.agent.workers.node_workers import NodeWorkers
from elastic.events import HangDetected
from elastic.observe.log import EventLog
from elastic.system.clock import Clock
from elastic.system.control_page import ControlPage

LOOK_EVERY_S = 0.2  # limits are of seconds, and a look reads a file of the kernel's for each worker


class Watchdog:
    def __init__(self, silences: HangDetector, page: ControlPage, log: EventLog, clock: Clock) -> None:
        self._silences = silences
        self._page = page
        self._log = log
        self._clock = clock
        self._looked_s = 0.0
        self.hung: Hung | None = None
        self.told: WorkerError | None = None  # by the worker that hangs, once it was heard

    def begin(self) -> None:
        """A new generation's workers start."""
        self._silences = self._silences.anew()
        self.hung = self.told = None

    def look(self, workers: NodeWorkers) -> None:
        now_s = self._clock.monotonic()
        if self.hung is not None or now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        sights = {}
        for rank, plan in workers.running.items():
            heartbeat = self._page.heartbeat(plan.local_rank)
            sights[rank] = WorkerSample(
                step=heartbeat.step,
                place=heartbeat.phase,
                beats=heartbeat.beats,
                is_stopped=is_stopped(workers.pid(rank)),
            )
        self._silences = self._silences.look(sights, now_s=now_s)
        self.hung = self._silences.hung

    def hear(self, workers: NodeWorkers) -> None:
        """Record the accusation, and have the worker show its stacks in its log."""
        hung = self.hung
        assert hung is not None
        self._log.record(
            HangDetected(
                rank=hung.rank,
                place=hung.place.name.lower(),
                silence_s=hung.silence_s,
                limit_s=hung.limit_s,
                reason=hung.reason,
            )
        )
        plan = workers.running.get(hung.rank)
        stacks = "" if plan is None else ask_for_stacks(workers.pid(hung.rank), plan.log, self._clock)
        self.told = WorkerError(
            rank=hung.rank, message=hung.reason, traceback=stacks, time=self._clock.wall()
        )
