"""A worker shows its agent that it moves and where it is; only its main thread does, so the place is always that of one thread.

The thread that exchanges gradients beside backward never beats: while it waits for peers the main thread still computes, and when that has nothing left to do it waits for
the exchange itself, and says so. What a silence means is the agent's business. A beat is a few stores to a page of memory, well under 5 µs.
It does not promise that a place is exact on a GPU: kernels run behind the host, which notices them, and peers behind nccl, where it next needs a number.
"""

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from elastic.system.phase import Phase

# All ranks are there together, for as long as the slowest needs: loading, say, or a store that does not answer. Waiting there is no part of a step.
TOGETHER = frozenset({Phase.START, Phase.SAVE, Phase.AFTER})

# Compilers work in the first step, optimizers build their state in it, and a rank that has finished it may wait in the second for one that has not: all of
# that counts as starting.
WARMUP_STEPS = 2


class Page(Protocol):
    def beat(self, local_rank: int, place: Phase) -> None: ...


class Unread:
    """A page that nobody reads, for parts that run without an agent around them."""

    def beat(self, local_rank: int, place: Phase) -> None:
        pass


class HeartbeatSender:
    def __init__(self, page: Page, local_rank: int) -> None:
        self._page = page
        self._local_rank = local_rank
        self._place = Phase.START
        self._finished_steps = 0

    def enter(self, place: Phase) -> None:
        self._place = place
        is_cold = self._finished_steps < WARMUP_STEPS and place is not Phase.AFTER
        self._page.beat(self._local_rank, Phase.START if is_cold else place)

    def finish_step(self) -> None:
        self._finished_steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around whatever ends only when other ranks do their part; afterwards this worker is where it was."""
        before = self._place
        self.enter(before if before in TOGETHER else Phase.WAIT)
        try:
            yield
        finally:
            self.enter(before)


def show_stacks_on_request() -> None:
    """From now on SIGQUIT writes the stacks of all threads to stderr, whatever the main thread does; the agent asks a worker that hangs."""
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)
