"""Many processes on one simulated clock: one runs at a time, and time passes only while all sleep.

Each process is a thread that hands a baton on, so code that calls and waits runs as it is. The same
seeds give the same run.
"""

import heapq
import threading
from collections.abc import Callable
from contextlib import suppress

LOCK_S = 0.0005  # how often a waiting process looks whether a lock is free


class Killed(BaseException):
    """Raised in a process at its next sleep after it was killed."""


class Process:
    def __init__(self, body: Callable[[], None], name: str) -> None:
        self.is_killed = False
        self.name = name
        self.baton = threading.Lock()
        self.baton.acquire()
        self.body = body


class SimulatedClock:
    """A Clock for the code under test; `spawn` and `sleep` may be called in any process."""

    def __init__(self) -> None:
        threading.stack_size(512 * 1024)
        self._now_s = 0.0
        self._sequence = 0
        self._due: list[tuple[float, int, Process]] = []
        self._current = self._main = Process(lambda: None, "main")

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s

    @property
    def current(self) -> Process:
        return self._current

    def spawn(self, body: Callable[[], None], name: str, after_s: float = 0.0) -> Process:
        process = Process(body, name)
        threading.Thread(target=self._run, args=(process,), daemon=True).start()
        self._push(process, after_s)
        return process

    def kill(self, process: Process) -> None:
        process.is_killed = True

    def sleep(self, seconds: float) -> None:
        me = self._current
        self._push(me, seconds)
        self._next(me)
        if me.is_killed:
            raise Killed

    def _run(self, process: Process) -> None:
        process.baton.acquire()
        with suppress(Killed):
            if not process.is_killed:
                process.body()
        self._next(None)

    def _push(self, process: Process, seconds: float) -> None:
        self._sequence += 1
        heapq.heappush(self._due, (self._now_s + seconds, self._sequence, process))

    def _next(self, me: Process | None) -> None:
        """Hand the baton to the process that is due next, and wait for it if this one goes on."""
        self._now_s, _, process = heapq.heappop(self._due)
        self._current = process
        if process is not me:
            process.baton.release()
            if me is not None:
                me.baton.acquire()


class SimulatedLock:
    """Takes the place of a thread's lock in code that sleeps while it holds one; reentrant."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._owner: Process | None = None
        self._depth = 0

    def __enter__(self) -> None:
        while self._owner not in (None, self._clock.current):
            self._clock.sleep(LOCK_S)
        self._owner = self._clock.current
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
