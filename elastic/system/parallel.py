"""Every task is done, or the first error is raised; no thread of the call outlives it.

A task is an iterator that stops between two pieces of its work: there an error elsewhere, or
Ctrl-C, ends it. It does not promise to be faster: the tasks must leave Python's lock, as hashlib,
NumPy and system calls do.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

MOST_THREADS = 8  # so many read and hash faster than most disks and memories are

Task = Iterator[None]


def num_threads() -> int:
    """One for each processor that this process may use, as far as more of them help."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def run_all(tasks: Iterable[Task], threads: int) -> None:
    """Run the tasks on so many threads. Raises the first error."""
    is_over = Event()

    def run(task: Task) -> None:
        try:
            while not is_over.is_set() and next(task, is_over) is None:
                pass
        except BaseException:
            is_over.set()
            raise

    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in [pool.submit(run, task) for task in tasks]:
                done.result()
        finally:
            is_over.set()
