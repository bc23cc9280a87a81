"""Every task is done, or the first error is raised; no thread of the call outlives it.

A task is an iterator that stops between two pieces of its work: there an error elsewhere, or
Ctrl-C, ends it. Where the kernel gives no thread, those that there are do everything. It does not
promise to be faster: the tasks must leave Python's lock, as hashlib, NumPy and system calls do.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator

MOST_THREADS = 8  # so many read and hash faster than most disks and memories are

Task = Iterator[None]


def num_threads() -> int:
    """One for each processor that this process may use, as far as more of them help."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def run_all(tasks: Iterable[Task], threads: int) -> None:
    """Run the tasks on this thread and on `threads` - 1 others. Raises the first error."""
    run = _Run(deque(tasks))
    helpers = [
        threading.Thread(target=run.work, daemon=True, name=f"task-{number}")
        for number in range(1, min(threads, len(run.waiting)))
    ]
    started = []
    for helper in helpers:
        try:
            helper.start()
        except RuntimeError:  # a limit of processes
            break
        started.append(helper)
    run.work()
    for helper in started:
        helper.join()
    if run.error is not None:
        raise run.error


class _Run:
    def __init__(self, waiting: deque[Task]) -> None:
        self.waiting = waiting
        self.error: BaseException | None = None

    def work(self) -> None:
        try:
            while self.error is None and (task := self._next()) is not None:
                for _ in task:
                    if self.error is not None:
                        return
        except BaseException as error:
            # The edge of a thread; on the caller's own thread the others have to end first.
            self.error = self.error or error

    def _next(self) -> Task | None:
        try:
            return self.waiting.popleft()
        except IndexError:
            return None
