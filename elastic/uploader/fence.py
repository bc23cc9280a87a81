"""A node outside the newest generation commits nothing, and only the newest generation deletes.

A fencing token is a number that only grows: a writer with a smaller one than the newest must stop.
Here the token is the newest generation that the node has entered. Only the agent can ask the
rendezvous for the newest one. It shares a page of memory with its uploader, each word of which one
of the two writes, and an eventfd that says only that there is a question:

    ASKED      uploader   when it asked last
    NEWEST     agent      the newest generation that the rendezvous has shown
    ENTERED    agent      the newest generation that has this node as a member
    READ       agent      when it began to read NEWEST
    TRIED      agent      when it began its last try to read it
    COMMITTED  uploader   the step that it committed last, for the group to remember
    COMMITS    uploader   how many it has committed

The uploader trusts only a number that was read after it asked. So a machine that was suspended, and
wakes up, cannot pass an old number to a save. Where the agent is dead, or its last try failed (the
rendezvous and its host may be gone), the last number counts: the newest state must be saved all the
same. An agent that lives and does not
answer, because it is stopped, stops the save.

It does not promise that no newer generation begins after the answer. A save that passes too late
commits a whole checkpoint, of a state on the run's one trajectory, and replaces none. To delete is
another matter: a newer generation may have resumed from what would go. So without an answer nothing
is deleted. Nor does it order its words on a processor that reorders stores, such as ARM: there READ
may be seen a moment before NEWEST, and an old number be trusted.
"""

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from elastic.errors import StoreFailed
from elastic.system.clock import Clock, since_boot_s

POLL_S = 0.002
# From the moment when a generation is formed: to its members' next look at the group, and the
# connection to its TCPStore.
ENTERING_S = 1.0
SILENT_S = 15.0  # an agent waits for its rendezvous for a few seconds
CLOSE_S = 1.0
_ASKED, _NEWEST, _ENTERED, _READ, _TRIED, _COMMITTED, _COMMITS = range(7)


class FencePage:
    """The agent's end: a thread that answers the uploader, until `close`."""

    def __init__(self, shown: Callable[[], int]) -> None:
        """shown: the newest generation, from the rendezvous; it may raise, and take seconds."""
        self._shown = shown
        memory, self._questions = os.memfd_create("elastic-fence", os.MFD_CLOEXEC), os.eventfd(0)
        self.fds = (memory, self._questions)  # for the uploader
        os.ftruncate(memory, mmap.PAGESIZE)
        self._words = _map(memory)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="fence", daemon=True)
        self._thread.start()

    def enter(self, generation: int) -> None:
        """Record that this node is a member of `generation`: saves of older ones may go on.

        Without this every change of membership would fence the save in hand, although its state is
        good. It is safe for two reasons. The agent killed the workers of the older generation
        before it entered this one, so nothing of theirs is written any more. And their state lies
        on the run's one trajectory, which does not depend on the nodes that train it. A node that
        was evicted is fenced until it has joined again.
        """
        self._words[_ENTERED] = max(self._words[_ENTERED], generation)

    @property
    def last_commit(self) -> tuple[int, int]:
        """(number of commits, step of the last one); (0, 0) before the first."""
        return self._words[_COMMITS], self._words[_COMMITTED]

    def close(self) -> None:
        self._is_closed = True
        os.eventfd_write(self._questions, 1)
        self._thread.join(CLOSE_S)  # a call may hang, and ends with the process then

    def _run(self) -> None:
        words = self._words
        while os.eventfd_read(self._questions) and not self._is_closed:
            if words[_TRIED] >= words[_ASKED]:
                continue
            began_ns = _now_ns()
            # An exception that ended this thread would stop all saves. The agent's own calls to the
            # rendezvous report the problem.
            with suppress(Exception):
                words[_NEWEST] = max(words[_NEWEST], self._shown())
                # After the number: an uploader that sees this time sees that number or a newer one.
                words[_READ] = began_ns
            words[_TRIED] = began_ns


class Fence:
    """The uploader's end, for one thread at a time."""

    def __init__(self, fds: tuple[int, ...], clock: Clock, *, is_orphan: Callable[[], bool]) -> None:
        """fds: of the agent's page; none where there is no agent, and so no fence. is_orphan:
        whether the agent is dead.
        """
        self._words = _map(fds[0]) if fds else None
        self._questions = fds[-1] if fds else -1
        self._clock = clock
        self._is_orphan = is_orphan

    def admits(self, generation: int) -> bool:
        """Whether a state of `generation` may be committed by this node now.

        A generation is formed a moment before its members enter it, so it fences only a node that
        has not entered it within ENTERING_S. Raises StoreFailed for a silent agent.
        """
        if (words := self._words) is None:
            return True
        began_s = self._clock.monotonic()
        while True:
            is_known = self._ask(words)
            is_admitted = words[_NEWEST] <= max(generation, words[_ENTERED])
            is_over = self._is_orphan() or self._clock.monotonic() - began_s >= ENTERING_S
            if is_over or (is_known and is_admitted):
                return is_admitted

    def is_newest(self, generation: int) -> bool:
        """Whether `generation` is known to be the newest, so that it may delete."""
        if (words := self._words) is None:
            return True
        # The next save waits for this, and needs no answer where the rendezvous gives none.
        with suppress(StoreFailed):
            return self._ask(words) and max(words[_NEWEST], words[_ENTERED]) <= generation
        return False

    def _ask(self, words: memoryview) -> bool:
        """Whether NEWEST was read after this call; else the agent is dead, or its try failed.

        Raises StoreFailed for a silent agent.
        """
        began_s = self._clock.monotonic()
        words[_ASKED] = asked_ns = _now_ns()
        os.eventfd_write(self._questions, 1)
        while True:
            is_orphan, tried_ns, read_ns = self._is_orphan(), words[_TRIED], words[_READ]
            if read_ns >= asked_ns:
                return True
            if tried_ns >= asked_ns or is_orphan:  # the time of a try is written last
                return False
            if self._clock.monotonic() - began_s >= SILENT_S:
                raise StoreFailed(
                    f"expected this node's agent to name the newest generation within {SILENT_S:.0f} s, found it silent;"
                    " nothing is committed without it"
                )
            self._clock.sleep(POLL_S)

    def record_commit(self, step: int) -> None:
        if (words := self._words) is not None:
            words[_COMMITTED] = step
            words[_COMMITS] += 1


def _map(fd: int) -> memoryview:
    """Native words: each is stored by one instruction, as in the control page."""
    return memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("q")


def _now_ns() -> int:
    return int(since_boot_s() * 1e9)
