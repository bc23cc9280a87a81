"""Handing over a snapshot costs a message, never a copy, and every offer gets a result.

The snapshot's slot is leased to the uploader until that result. It does not promise that the
snapshot is saved: a save that fails, or whose uploader dies, has a result that says so. An uploader
that dies is started again for as long as its owner lives, ever more rarely.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from elastic.errors import CannotStart, StoreFailed, UsageError
from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.system import stop_signals
from elastic.system.clock import Clock, SystemClock
from elastic.system.untrusted import decode
from elastic.uploader.fence import FencePage
from elastic.uploader.protocol import MESSAGE_BYTES, Offer, SaveResult, SaveState, UploaderConfig

RECONNECT_PAUSE_S = 0.02
READY_LIMIT_S = 300.0  # it imports, perhaps from a network file system that is read for the first time
STOP_S = 30.0
LONGEST_FINISH_S = 4 * 3600.0  # a save limits itself; this is for an uploader that stands still
OFFER_S = 1.0
FINAL_OFFER_S = 15.0
SAY_AFTER_S = 1.0
POLL_S = 0.1
STABLE_S = 2.0  # a process that lived so long did not die of its start
LONGEST_PAUSE_S = 30.0
MANY_DEATHS = 5  # from here on it is said that nothing is saved
_CLOCK = SystemClock()


def offer(
    path: str,
    slots: SnapshotSlots,
    snapshot: Snapshot,
    *,
    resumed_from: int | None,
    final: bool,
    within_s: float = OFFER_S,
) -> "Handover":
    """Hand over a snapshot of `slots`, which may be closed afterwards.

    path: of the uploader's socket. resumed_from: as in `Offer`. A final offer is tried again for
    `within_s`, because the uploader may just be restarting. Raises StoreFailed when no uploader
    takes it.
    """
    message = Offer(
        step=snapshot.info.step,
        generation=snapshot.info.generation,
        slot=snapshot.slot,
        seq=snapshot.seq,
        resumed_from=resumed_from,
        is_final=final,
    )
    deadline = _CLOCK.monotonic() + within_s
    while True:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, theirs:
            try:
                sender.settimeout(max(0.001, deadline - _CLOCK.monotonic()))  # 0 would not wait at all
                sender.connect(path)
                text = json.dumps(asdict(message)).encode()
                socket.send_fds(sender, [text], [slots.fd, theirs.fileno()])
            except OSError as error:
                ours.close()
                if not final or _CLOCK.monotonic() + RECONNECT_PAUSE_S >= deadline:
                    raise StoreFailed(
                        f"expected an uploader at {path} to take step {message.step} within {within_s:.0f} s, "
                        f"found none ({error}); was it killed?"
                    ) from error
                _CLOCK.sleep(RECONNECT_PAUSE_S)
                continue
        return Handover(ours, message.step)


class Handover:
    """An offer that the uploader has; this socket carries the result, and then ends."""

    def __init__(self, connection: socket.socket, step: int) -> None:
        self.step = step
        self._connection = connection

    def wait(self, timeout_s: float) -> SaveResult | None:
        """The result, once; None when it does not come in time."""
        # `select` would refuse descriptors above 1023, and a recipe may have as many files open.
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(1000 * timeout_s):
            return None
        reason = "the uploader ended before it answered; the checkpoint may be committed all the same"
        with self._connection as connection:
            try:
                if answer := connection.recv(MESSAGE_BYTES):
                    return decode(SaveResult, answer, what="the result")
            except (OSError, ValueError) as error:
                reason = f"the uploader's connection broke: {error}"
        return SaveResult(step=self.step, state=SaveState.LOST, reason=reason)

    def close(self) -> None:
        """Hang up; the save goes on."""
        self._connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class UploaderDeath:
    """reason: how it ended, or why it could not be started. deaths: in a row. pause_s: until the
    next start.
    """

    reason: str
    deaths: int
    pause_s: float

    def __str__(self) -> str:
        when = f"in {self.pause_s:g} s" if self.pause_s else "now"
        if self.deaths >= MANY_DEATHS:
            return (
                f"the uploader died {self.deaths} times in a row ({self.reason}): NOTHING IS SAVED until it runs again, {when}."
                " Training goes on; look at the uploader's messages above and at this machine's memory"
            )
        return f"the uploader died ({self.reason}) and is started again {when}; a save in progress is lost, training goes on"


class UploaderProcess:
    """The owner's end: the uploader stays while its owner holds its standard input open."""

    def __init__(
        self,
        config: UploaderConfig,
        process: "subprocess.Popen[bytes]",
        fence: FencePage | None = None,
        clock: Clock = _CLOCK,
    ) -> None:
        self._config = config
        self._process = process
        self._fence = fence
        self._clock = clock
        self._started_s = clock.monotonic()
        self._deaths = 0  # in a row, each within STABLE_S of its start
        self._due_s = 0.0  # of the next start
        self._is_recorded = False  # the death of the process

    @staticmethod
    def start(config: UploaderConfig, *, shown: Callable[[], int] | None = None) -> "UploaderProcess":
        """Spawn it, in a session of its own, out of reach of a terminal's signals; see
        `wait_ready`. shown: the newest generation, for an agent (fence.py). Raises CannotStart.
        """
        fence = None if shown is None else FencePage(shown)
        if fence is not None:
            config = replace(config, fence=fence.path)
        try:
            return UploaderProcess(config, _spawn(config), fence)
        except OSError as error:
            raise CannotStart(f"no process can be started for the uploader ({error})") from error

    def revive(self) -> UploaderDeath | None:
        """Start a new one if it died and its pause is over; returns a death that is news.

        The saves that the dead one had in hand are lost; their clients have results that say so.
        """
        code, news = self._process.poll(), None
        if code is None:
            return None
        if not self._is_recorded:
            news = self._record(_how_it_ended(code), lived_s=self._clock.monotonic() - self._started_s)
        if self._clock.monotonic() < self._due_s:
            return news
        try:
            self._process = _spawn(self._config)
        except OSError as error:
            # No memory or no process left: the moment in which an uploader is likely to be killed.
            return self._record(f"it cannot be started: {error}", lived_s=0.0)
        self._started_s, self._is_recorded = self._clock.monotonic(), False
        return news

    def _record(self, reason: str, *, lived_s: float) -> UploaderDeath:
        """The first start comes at once, as most deaths are single ones; then 0.5, 1, 2, ... s."""
        self._is_recorded, pause_s = True, 0.0
        self._deaths = 1 if lived_s >= STABLE_S else self._deaths + 1
        if self._deaths > 1:
            pause_s = min(LONGEST_PAUSE_S, 0.5 * 2.0 ** min(self._deaths - 2, 10))
        self._due_s = self._clock.monotonic() + pause_s
        return UploaderDeath(reason=reason, deaths=self._deaths, pause_s=pause_s)

    @property
    def socket_path(self) -> str:
        return self._config.socket_path

    @property
    def pid(self) -> int | None:
        """None while none is alive: the number may belong to another process."""
        return self._process.pid if self.is_alive() else None

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Return when clients can connect.

        Raises UsageError for a store that cannot be used, StoreFailed when the uploader does not
        start.
        """
        output = self._process.stdout
        assert output is not None, "it is spawned with a pipe"
        poll = select.poll()
        poll.register(output, select.POLLIN)
        line = output.readline() if poll.poll(1000 * READY_LIMIT_S) else b""
        output.close()
        message = json.loads(line) if line.endswith(b"\n") else {}
        if "error" in message:
            raise UsageError(message["error"])
        if "ready" not in message:
            raise StoreFailed(
                f"expected the uploader to be ready within {READY_LIMIT_S:.0f} s, found it silent; see its messages above"
            )

    def enter(self, generation: int) -> None:
        """Record that this node is a member of `generation`: it fences no save in hand."""
        if self._fence is not None:
            self._fence.enter(generation)

    @property
    def last_commit(self) -> tuple[int, int]:
        """(number of commits, step of the last one), of an agent's uploaders; (0, 0) for none."""
        return (0, 0) if self._fence is None else self._fence.last_commit

    def release(self) -> None:
        """In a child that the owner forked: the pipe is the owner's alone."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def ask_to_end(self, within_s: float) -> bool | None:
        """Ask it to finish and exit; whether it finished everything, None while it goes on."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(within_s) == os.EX_OK
        return None

    def finish(
        self, report: Callable[[str], None], *, ended_by: str, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Stop it once it has finished its saves, which have limits of their own, or `is_over`.

        ended_by: how a person shortens the wait.
        """
        began_s, is_said = self._clock.monotonic(), False
        while not is_over() and self.ask_to_end(POLL_S) is None:
            waited_s = self._clock.monotonic() - began_s
            if waited_s >= LONGEST_FINISH_S:
                break
            if waited_s >= SAY_AFTER_S and not is_said:
                is_said = True
                report(f"waiting for the save in progress; {ended_by}")
        self.stop(0.0)

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Ask it to finish and exit, kill it after `timeout_s`; True if it finished everything."""
        is_done = self.ask_to_end(timeout_s)
        if is_done is None:
            self._process.kill()
            self._process.wait()
        if self._fence is not None:
            self._fence.close()
        return bool(is_done)


def _how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _spawn(config: UploaderConfig) -> "subprocess.Popen[bytes]":
    with stop_signals.blocked():
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "elastic.uploader.main", config.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
