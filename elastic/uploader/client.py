"""Handing a snapshot to the uploader costs a message, never a copy nor an upload; its slot is the uploader's until the answer.

It does not promise that the snapshot is saved: what became of it comes back as an answer, also when the uploader dies.
"""

import json
import os
import select
import socket
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from elastic.errors import StoreFailed, UsageError
from elastic.system.clock import SystemClock
from elastic.system.json_lines import JsonLineSocket
from elastic.uploader.protocol import UploaderConfig

OFFER_LIMIT_S = 1.0
FINAL_OFFER_LIMIT_S = 15.0
RECONNECT_PAUSE_S = 0.02
MOST_REVIVALS = 20
READY_LIMIT_S = 60.0
ENTER_LIMIT_S = 0.5
_CLOCK = SystemClock()


class UploaderClient:
    """The side of a worker, or of the agent, of the uploader's socket. Connects at the first offer, and anew when the uploader was restarted."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._connection: JsonLineSocket | None = None
        self._unanswered: list[int] = []
        self._answers: list[dict[str, Any]] = []

    def offer(self, fd: int, meta: dict[str, Any], *, final: bool = False) -> None:
        """Hand over a snapshot in the area behind `fd`, which may be closed afterwards; `meta` has the fields of `wire.Offer`.

        Takes 1 s at most; a final save waits longer for an uploader that is being started anew. Raises StoreFailed when none takes it.
        """
        limit_s = FINAL_OFFER_LIMIT_S if final else OFFER_LIMIT_S
        deadline = _CLOCK.monotonic() + limit_s
        self._receive()
        try:
            connection = self._connected(deadline, is_patient=final)
            connection.send(meta | {"final": final}, [fd], timeout_s=_left_s(deadline))
        except OSError as error:
            self._lose(f"the uploader's connection broke: {error}")
            raise StoreFailed(
                f"expected an uploader at {self._path} to take step {meta.get('step')} within {limit_s:.0f} s, "
                f"found none ({error}); was it killed?"
            ) from error
        self._unanswered.append(int(meta["step"]))

    def poll(self) -> list[dict[str, Any]]:
        """The answers that have come since the last call, each with step, state (committed, failed, dropped), reason, digest and cpu_s.

        digest: of the state that is committed, in hexadecimal, else empty. cpu_s: seconds of processor that the uploader took for it. An uploader that died tells neither.
        """
        self._receive()
        answers, self._answers = self._answers, []
        return answers

    def wait(self, step: int, timeout_s: float) -> dict[str, Any] | None:
        """The answer for `step`, or None when it does not come in time; the others stay for `poll`."""
        deadline = _CLOCK.monotonic() + timeout_s
        while True:
            self._receive()
            for answer in self._answers:
                if answer["step"] == step:
                    self._answers.remove(answer)
                    return answer
            if _CLOCK.monotonic() >= deadline or self._connection is None:
                return None
            self._connection.wait(_left_s(deadline))

    def close(self) -> None:
        """Leave; saves that were handed over go on."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self, deadline: float, *, is_patient: bool) -> JsonLineSocket:
        while self._connection is None:
            try:
                self._connection = _connect(self._path, deadline)
            except OSError:
                if not is_patient or _CLOCK.monotonic() + RECONNECT_PAUSE_S >= deadline:
                    raise
                _CLOCK.sleep(RECONNECT_PAUSE_S)
        return self._connection

    def _receive(self) -> None:
        if self._connection is None:
            return
        try:
            for message in self._connection.receive():
                self._take(message)
            if self._connection.has_ended:
                self._lose(
                    "the uploader ended before it answered; the checkpoint may be committed all the same"
                )
        except (OSError, ValueError) as error:
            self._lose(f"the uploader's connection broke: {error}")

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("step") in self._unanswered:
            self._unanswered.remove(message["step"])
        if "state" in message:
            self._answers.append(message)

    def _lose(self, reason: str) -> None:
        self.close()
        self._answers += [{"step": step, "state": "failed", "reason": reason} for step in self._unanswered]
        self._unanswered.clear()


class UploaderProcess:
    """The owner's side: as long as it holds the process's standard input open, the uploader stays."""

    def __init__(self, config: UploaderConfig, process: "subprocess.Popen[bytes]") -> None:
        self._config = config
        self._process = process
        self._revivals = 0
        self._is_told = True

    @staticmethod
    def start(config: UploaderConfig) -> "UploaderProcess":
        """Spawn it, in a session of its own so that a terminal's signals pass it by; `wait_ready` says whether it serves."""
        return UploaderProcess(config, _spawn(config))

    def revive(self) -> bool:
        """Start it anew if it died, MOST_REVIVALS times in all; True if it had to. Its saves in flight were lost, and their clients told."""
        if self.is_alive() and not self._is_told:
            self.enter(self._config.entered)
        if self.is_alive() or self._revivals >= MOST_REVIVALS:
            return False
        self._revivals += 1
        self._is_told = True
        self._process = _spawn(self._config)
        return True

    @property
    def socket_path(self) -> str:
        return self._config.socket_path

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = READY_LIMIT_S) -> None:
        """Return when clients can connect. Raises UsageError for a store that cannot be used, StoreFailed when it does not start."""
        said = self._process.stdout
        assert said is not None, "it is spawned with a pipe"
        readable, _, _ = select.select([said], [], [], timeout_s)
        line = said.readline() if readable else b""
        said.close()
        message = json.loads(line) if line.endswith(b"\n") else {}
        if "error" in message:
            raise UsageError(message["error"])
        if "ready" not in message:
            raise StoreFailed(
                f"expected the uploader to be ready within {timeout_s:.0f} s, found it silent; see its messages above"
            )

    def enter(self, generation: int) -> bool:
        """Tell it that this node is a member of `generation`, so that this one does not fence the saves that it has in hand.

        False when it does not hear it now; then `revive` tells it again, or starts its successor with it.
        """
        self._config = replace(self._config, entered=max(generation, self._config.entered))
        self._is_told = self._tell({"entered": self._config.entered})
        return self._is_told

    def _tell(self, message: dict[str, Any]) -> bool:
        """True once the uploader has said the same back."""
        deadline = _CLOCK.monotonic() + ENTER_LIMIT_S
        with (
            suppress(OSError, ValueError),
            closing(_connect(self._config.socket_path, deadline)) as connection,
        ):
            connection.send(message, timeout_s=_left_s(deadline))
            while not connection.has_ended and _CLOCK.monotonic() < deadline:
                connection.wait(_left_s(deadline))
                if message in connection.receive():
                    return True
        return False

    def stop(self, timeout_s: float) -> bool:
        """Ask it to finish and leave; kill it when it has not after `timeout_s`. True when it finished everything."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            return self._process.wait(timeout_s) == os.EX_OK
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False


def _spawn(config: UploaderConfig) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "elastic.uploader.main", config.to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _connect(path: str, deadline: float) -> JsonLineSocket:
    """Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_left_s(deadline))
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return JsonLineSocket(connection)


def _left_s(deadline: float) -> float:
    """Seconds until `deadline`; never 0, which would make a socket non-blocking."""
    return max(0.001, deadline - _CLOCK.monotonic())
