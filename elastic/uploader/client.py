"""Handing over a snapshot costs a message, never a copy, and every offer gets a result.

The snapshot's slot is leased to the uploader while it is saved. It does not promise that the
snapshot is saved: a save that fails, or whose uploader dies, has a result that says so. An uploader
that dies is started again by its owner, and finds the offers that wait.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from elastic.errors import CannotStart, StoreFailed, UsageError
from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.storage.remote import open_store
from elastic.system import stop_signals
from elastic.system.clock import Clock, SystemClock
from elastic.system.processes import signal_name
from elastic.system.untrusted import decode
from elastic.uploader.fence import FencePage
from elastic.uploader.protocol import MESSAGE_BYTES, Offer, SaveResult, SaveState, UploaderConfig

STOP_S = 30.0
OFFER_S = 1.0
SAY_AFTER_S = 1.0
POLL_S = 0.1
RESTART_S = 2.0  # between two starts, where an uploader dies at once
DIED = (
    "the uploader died ({reason}) and is started again; a save in progress is lost, training goes on. Does it come again?"
    " Look at this machine's memory"
)
_CLOCK = SystemClock()


def offer(
    path: str,
    slots: SnapshotSlots,
    snapshot: Snapshot,
    *,
    resumed_from: int | None,
    final: bool,
    wants_digest: bool = False,
) -> "Handover":
    """Hand over a snapshot of `slots`, which may be closed afterwards.

    path: of the uploader's socket, in which the offer waits while the uploader saves, or is
    started. resumed_from, wants_digest: as in `Offer`. Raises StoreFailed where none takes it.
    """
    message = Offer(
        step=snapshot.info.step,
        generation=snapshot.info.generation,
        slot=snapshot.slot,
        seq=snapshot.seq,
        resumed_from=resumed_from,
        is_final=final,
        wants_digest=wants_digest,
    )
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, theirs:
        try:
            sender.settimeout(OFFER_S)
            sender.connect(path)
            socket.send_fds(sender, [json.dumps(asdict(message)).encode()], [slots.fd, theirs.fileno()])
        except OSError as error:
            ours.close()
            raise StoreFailed(
                f"expected an uploader at {path} to take step {message.step} within {OFFER_S:.0f} s, "
                f"found none ({error}); was it killed?"
            ) from error
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


class UploaderProcess:
    """The owner's end: the uploader stays while its owner holds its standard input open."""

    def __init__(
        self, config: UploaderConfig, *, shown: Callable[[], int] | None = None, clock: Clock = _CLOCK
    ) -> None:
        """Spawn it, in a session of its own, out of reach of a terminal's signals.

        shown: the newest generation, for an agent (fence.py). Raises UsageError for a store that
        cannot be used, CannotStart.
        """
        open_store(config.run.checkpoints_url)
        self._offers = listen(config.socket_path)
        self._clock = clock
        self._started_s = clock.monotonic()
        try:
            self._fence = None if shown is None else FencePage(shown)
            fds = () if self._fence is None else self._fence.fds
            self._config = replace(config, offers=self._offers.fileno(), fence=fds)
            self._process = _spawn(self._config)
        except OSError as error:
            raise CannotStart(f"no process can be started for the uploader ({error})") from error

    def revive(self) -> str:
        """Start another one if it died, at most one in RESTART_S. Returns why it died, or "".

        The save that the dead one had in hand is lost; its client has a result that says so.
        """
        code, now_s = self._process.poll(), self._clock.monotonic()
        if code is None or now_s < self._started_s + RESTART_S:
            return ""
        self._started_s = now_s
        reason = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        try:
            self._process = _spawn(self._config)
        except OSError as error:
            # No memory or no process left: the moment in which an uploader is likely to be killed.
            reason = f"{reason}; it cannot be started: {error}"
        return reason

    def revive_until(self, ended: threading.Event, report: Callable[[str], None]) -> None:
        """Without an agent, which does so in its turns: for a thread of its own."""
        while not ended.wait(RESTART_S):
            if reason := self.revive():
                report(DIED.format(reason=reason))

    @property
    def socket_path(self) -> str:
        return self._config.socket_path

    @property
    def pid(self) -> int:
        return self._process.pid

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

    def ask_to_end(self, within_s: float) -> bool:
        """Ask it to finish and exit; whether it has."""
        self.release()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def finish(
        self, report: Callable[[str], None], *, ended_by: str, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Stop it once it has finished its saves, which have limits of their own, or `is_over`.

        ended_by: how a person shortens the wait.
        """
        began_s, is_said = self._clock.monotonic(), False
        while not is_over() and not self.ask_to_end(POLL_S):
            if not is_said and self._clock.monotonic() - began_s >= SAY_AFTER_S:
                is_said = True
                report(f"waiting for the save in progress; {ended_by}")
        self.stop(0.0)

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Ask it to finish and exit, kill it after `timeout_s`; True if it finished everything."""
        if not self.ask_to_end(timeout_s):
            self._process.kill()
        code = self._process.wait()
        self._offers.close()
        if self._fence is not None:
            self._fence.close()
        return code == os.EX_OK


def listen(path: str) -> socket.socket:
    """Where offers arrive: in the owner's folder, which no other user may enter."""
    offers = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        offers.bind(path)
        Path(path).chmod(0o600)
    except OSError as error:
        offers.close()
        raise UsageError(
            f"expected a path of at most 100 bytes for the uploader's socket, found {path} ({error}); set TMPDIR to a folder with a shorter name"
        ) from error
    return offers


def _spawn(config: UploaderConfig) -> "subprocess.Popen[bytes]":
    with stop_signals.blocked():
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "elastic.uploader.main", json.dumps(asdict(config))],
            stdin=subprocess.PIPE,
            stdout=2,  # what a library prints goes to the log
            pass_fds=(config.offers, *config.fence),
            start_new_session=True,
        )
