"""A fault does not wait for the script: a standby has run it already.

A standby is a worker of a local rank without an assignment to a generation. It runs the script
until that needs its rank, mostly in `run.steps`, and waits there (config/environment.py). When the
agent starts a worker, it hands the assignment to the standby of that local rank, if one waits. The
next standby is started beside training, one at a time and at low priority, or where this node waits
for others: a spare node has its standbys too.

Until it has its assignment a standby is no part of the run, and changes nothing that others see. If
it ends, hangs or lacks memory, the next fault forks a worker, as without it; the kernel kills it
before a worker. It has the recipe as it was when it began, and is not used for another text of it.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import inf
from multiprocessing.connection import Connection, Pipe  # noqa: TID251 - bytes alone, between an agent and its child
from multiprocessing.reduction import send_handle  # noqa: TID251 - bytes alone, between an agent and its child
from pathlib import Path
from threading import get_native_id

from elastic.agent.parts import AgentParts
from elastic.agent.worker_process import Process
from elastic.agent.workers import WorkerStart, standby_request
from elastic.errors import CannotStart
from elastic.events import StandbyEnded, StandbyWaits
from elastic.system.files import make_folders
from elastic.system.processes import available_bytes, is_stopped, resident_bytes, signal_name
from elastic.system.worker_protocol import Started

SLOW_SCRIPT_S = 2.0  # from the start of a worker to its loop, from which on `auto` has standbys
IDLE_S = 5.0  # without workers: longer than a rendezvous of nodes that are there
_NICENESS = 10
_OWN_NICENESS = os.getpriority(os.PRIO_PROCESS, 0)
_KILLED_FIRST = "1000"  # oom_score_adj, proc(5)


@dataclass(slots=True, kw_only=True)
class Standby:
    answer: list[Started]
    connection: Connection
    log: Path  # it becomes that of the worker
    recipe: tuple[int, ...]  # which text it began with
    began_s: float
    process: Process | None = None  # None until it is known
    oom_score: str = ""  # oom_score_adj that it had
    waits: bool = False


class Standbys:
    """Those of one node, by local rank."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self._of_rank: dict[int, Standby] = {}
        self._tried = set[int]()  # since the workers were started, so that none dies again and again
        self._script_s = 0.0  # how long a worker took to its loop, the last time that it ran the script
        self._new_since_s: float | None = None  # when workers began that run it now
        self._idle_since_s: float | None = None

    def begin(self, *, ran_anew: bool) -> None:
        """The workers of a generation have started. ran_anew: one of them runs the script anew."""
        self._tried.clear()
        self._new_since_s = self._parts.clock.monotonic() if ran_anew else None

    def poll(self, pids: Sequence[int]) -> None:
        """Called several times a second. pids: of this node's workers, none between generations."""
        parts, now_s = self._parts, self._parts.clock.monotonic()
        if not parts.settings.imports_library or parts.settings.options.standby == "off":
            return
        if parts.shutdown.reason is not None:  # this node leaves, and needs the memory for its save
            self.close()
            return
        nproc = range(parts.settings.nproc)
        if self._new_since_s and all(parts.page.open_step(each) is not None for each in nproc):
            self._script_s, self._new_since_s = now_s - self._new_since_s, None
        self._idle_since_s = None if pids else self._idle_since_s or now_s
        self._look()
        missing = [rank for rank in nproc if rank not in self._of_rank and rank not in self._tried]
        if missing and all(each.waits for each in self._of_rank.values()) and self._is_time(pids):
            self._tried.add(missing[0])
            if parts.settings.options.standby == "on" or self._has_room(pids):
                with suppress(CannotStart, OSError):
                    self._of_rank[missing[0]] = self._start(missing[0])

    def take(self, start: WorkerStart) -> Process | None:
        """Hand this worker's assignment to the standby, if one waits."""
        self._look()
        standby = self._of_rank.get(start.local_rank)
        if standby is None or standby.process is None:
            return None
        del self._of_rank[start.local_rank]
        if not standby.waits or is_stopped(standby.process.pid):
            # Beside a worker that begins it could wait for a lock, and that one for it.
            self._end(standby, f"local rank {start.local_rank} was not ready", is_said=False)
            return None
        try:
            if standby.recipe != self._recipe():
                raise OSError("the recipe was edited")
            _raise_priority(standby.process.pid, standby.oom_score)
            standby.connection.send_bytes(json.dumps(start.assignment).encode())
            for descriptor in start.store:
                send_handle(standby.connection, descriptor, standby.process.pid)
        except OSError as error:
            self._end(standby, f"local rank {start.local_rank} is not used: {error}")
            return None
        standby.connection.close()
        with suppress(OSError):  # a full disk costs the log
            make_folders(start.log.parent)
            if not start.log.exists():
                standby.log.rename(start.log)
        return standby.process

    def close(self) -> None:
        for rank, standby in [*self._of_rank.items()]:
            if self._is_known(standby):
                del self._of_rank[rank]
                self._end(standby, f"local rank {rank} is not needed any more", is_said=False)
            else:  # it dies with the fork server
                with suppress(OSError):
                    standby.log.unlink()

    def _is_known(self, standby: Standby) -> bool:
        """Whether the fork server has said which process it is."""
        if standby.process is None:
            self._parts.spawner.receive()
        if standby.process is None and standby.answer:
            with suppress(CannotStart):
                standby.process = self._parts.spawner.process_of(standby.answer[0])
                standby.oom_score = _lower_priority(standby.process.pid)
        return standby.process is not None

    def _look(self) -> None:
        """Take note of those that run, wait or have ended."""
        for rank, standby in [*self._of_rank.items()]:
            if not self._is_known(standby):
                if standby.answer:
                    del self._of_rank[rank]
                continue
            assert standby.process is not None
            seconds = self._parts.clock.monotonic() - standby.began_s
            if (code := standby.process.poll()) is not None:
                del self._of_rank[rank]
                how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
                self._end(standby, f"local rank {rank} ended after {seconds:.1f} s: {how}", keeps_log=True)
            elif not standby.waits and standby.connection.poll():
                with suppress(EOFError, OSError):
                    standby.waits = standby.connection.recv_bytes() == b"waits"
                    self._parts.log.record(StandbyWaits(pid=standby.process.pid, seconds=seconds))

    def _is_time(self, pids: Sequence[int]) -> bool:
        """Whether another one is wanted, and would not delay what comes first."""
        parts, settings = self._parts, self._parts.settings
        if pids:
            would_delay = parts.common_step <= parts.page.restored_step
        else:
            would_delay = parts.clock.monotonic() - (self._idle_since_s or inf) < IDLE_S
        if would_delay or settings.declared is None:
            return False
        is_slow = self._script_s > SLOW_SCRIPT_S or not pids
        return settings.options.standby == "on" or (is_slow and settings.declared.device == "cpu")

    def _has_room(self, pids: Sequence[int]) -> bool:
        """Whether this machine has memory for one more, and for two snapshots besides."""
        slots, available = self._parts.memory.slots, available_bytes()
        needed = max(map(resident_bytes, pids), default=0) + (2 * slots.capacity_bytes if slots else 0)
        return available is None or needed <= available

    def _start(self, local_rank: int) -> Standby:
        """Raises CannotStart, OSError."""
        parts, settings = self._parts, self._parts.settings
        log = settings.run.logs / f"{parts.log.generation:06d}" / f"standby-{settings.node}-{local_rank}"
        make_folders(log.parent)
        recipe, (connection, theirs) = self._recipe(), Pipe()
        with theirs, log.open("wb") as out:
            outputs = out.fileno(), out.fileno()
            answer = parts.spawner.ask(standby_request(settings, local_rank), *outputs, theirs.fileno())
        began_s = parts.clock.monotonic()
        return Standby(answer=answer, connection=connection, log=log, recipe=recipe, began_s=began_s)

    def _recipe(self) -> tuple[int, ...]:
        """Which text of the recipe is there now. Raises OSError."""
        found = Path(self._parts.settings.options.recipe).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _end(self, standby: Standby, reason: str, *, is_said: bool = True, keeps_log: bool = False) -> None:
        assert standby.process is not None
        standby.process.kill()
        self._parts.log.record(StandbyEnded(pid=standby.process.pid, reason=reason))
        standby.connection.close()  # after its end: what waits for it would go on
        if is_said:
            words = f"; {standby.log} has its words" if keeps_log else ""
            self._parts.console.print_line(
                f"the standby worker of {reason}; the run goes on without it{words}"
            )
        if not keeps_log:
            with suppress(OSError):
                standby.log.unlink()


def _lower_priority(pid: int) -> str:
    """Also where memory is short and the kernel kills one; returns that score as it was."""
    before, score = "", Path(f"/proc/{pid}/oom_score_adj")
    with suppress(OSError):
        before = score.read_text()
        score.write_text(_KILLED_FIRST)
    _set_niceness(pid, _NICENESS)
    return before


def _raise_priority(pid: int, oom_score: str) -> None:
    """Of all its threads."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(oom_score)
    _set_niceness(pid, 0)


def _set_niceness(pid: int, more: int) -> None:
    """More than this process's own. Where the kernel groups processes by sessions, a session's
    niceness among sessions counts, and everyone may lower it again (sched(7), autogroup).
    """
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(more))
    with suppress(OSError):
        if _can_raise_priority():
            os.setpriority(os.PRIO_PROCESS if more else os.PRIO_PGRP, pid, _OWN_NICENESS + more)


@cache
def _can_raise_priority() -> bool:
    """A thread tries it: without the right to, which most containers lack, it would stay low."""

    def tries() -> None:
        for niceness in (_OWN_NICENESS + 1, _OWN_NICENESS):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), niceness)

    with suppress(OSError, RuntimeError), ThreadPoolExecutor(1) as thread:  # there may be too many
        thread.submit(tries).result()
        return True
    return False
