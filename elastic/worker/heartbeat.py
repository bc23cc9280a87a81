"""A worker's heartbeat shows its agent that the main thread moves, and in which phase of its work.

Only the main thread beats. The thread that exchanges gradients during backward never does: while it
waits for peers the main thread still computes, and when that has nothing left to compute it waits
for the exchange itself and enters WAIT. So the phase is always that of one thread. One beat is a
few stores to a page of memory and takes less than 5 µs. What a silence means is decided by the
agent (agent/hang_detector.py).

On a GPU the phase is not exact. Kernels run behind the host, so the host shows a kernel that hangs,
or a peer that nccl waits for, in the phase in which it next needs a result.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from elastic.system.clock import Clock, SystemClock
from elastic.system.control_page import ControlPage
from elastic.system.silence import Phase

# All ranks are in these phases together, for as long as the slowest of them needs, for example to
# load or to reach a store. A rank that waits there stays in the phase: WAIT is for peers in a step,
# and with `--hang-timeout` its limit is far shorter.
COLLECTIVE_PHASES = frozenset({Phase.START, Phase.SAVE, Phase.AFTER})

# Steps at the beginning of a generation that count as starting. Compilers work in the first step,
# and optimizers build their state in it. A rank that has finished it may wait in the second step
# for a rank that has not.
WARMUP_STEPS = 2


class HeartbeatSender:
    """waited_s: seconds that this rank has spent in `waiting` so far.

    phase: of the work itself, in the first steps too; `enter` sets it.
    """

    def __init__(self, page: ControlPage, local_rank: int, clock: Clock | None = None) -> None:
        self.waited_s = 0.0
        self._clock: Clock = clock or SystemClock()
        self._page = page
        self._local_rank = local_rank
        self.phase = Phase.START
        self._finished_steps = 0

    def enter(self, phase: Phase) -> None:
        """Beat, in this phase from now on."""
        self.phase = phase
        is_warmup = self._finished_steps < WARMUP_STEPS and phase is not Phase.AFTER
        self._page.beat(self._local_rank, Phase.START if is_warmup else phase)

    def beat(self) -> None:
        """Show progress, in the same phase."""
        self.enter(self.phase)

    def finish_step(self) -> None:
        self._finished_steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around an operation that ends only when other ranks do their part."""
        before, began_s = self.phase, self._clock.monotonic()
        self.enter(before if before in COLLECTIVE_PHASES else Phase.WAIT)
        try:
            yield
        finally:
            self.waited_s += self._clock.monotonic() - began_s
            self.enter(before)
