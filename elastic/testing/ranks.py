"""A test runs a function on n real processes of one gloo group, and gets every rank's answer.

Functions are found again by file and name, arguments and answers are JSON. A rank that raises, dies
or is late fails the call, and with it the group: the next call starts a fresh one. It does not
simulate networks or clocks; the fakes of stores and clocks are in `elastic.testing.fakes`.
"""

import inspect
import json
import multiprocessing
import runpy
import tempfile
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from elastic.system.clock import SystemClock

CALL_S = 120.0
_names_of = cache(runpy.run_path)  # a file runs once in each rank, not once for each call
# Optimizers import torch._dynamo at their first step, which takes seconds; the fork server does it
# once for all ranks.
PRELOAD = ["torch._dynamo", "elastic.train.step.step", "elastic.train.state.state"]
PRELOAD += ["elastic.testing.ranks", "hypothesis", "pytest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process in the group that the function runs on; `group` is None for a world of one."""

    rank: int
    world_size: int
    group: dist.ProcessGroup | None


class Ranks(AbstractContextManager["Ranks"]):
    """Up to `limit` ranks. Use as a context manager; nothing is started before the first `run`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._members: list[tuple[ForkServerProcess, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """[function(member, *arguments) of rank 0, rank 1, ...]; arguments and answers are JSON.

        The function stands at the top level of its file.

        Raises AssertionError with the traceback of the first rank that raised, or when one died or
        took longer than CALL_S.
        """
        assert 1 <= world_size <= self.limit
        if not self._members:
            self._start()
        task = [inspect.getfile(function), function.__qualname__, world_size, arguments]
        members = self._members[:world_size]
        for _, pipe in members:
            pipe.send_bytes(json.dumps(task).encode())
        try:
            return self._answers([pipe for _, pipe in members])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends every process; by force, because a rank may wait for a dead one."""
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join()
        self._members = []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="elastic-ranks-")
        for rank in range(self.limit):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.limit, f"{self._folder.name}/store")
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def _answers(self, pipes: list[Connection]) -> list[Any]:
        found: dict[Connection, Any] = {}
        clock = SystemClock()
        deadline = clock.monotonic() + CALL_S
        while len(found) < len(pipes):
            missing = [pipe for pipe in pipes if pipe not in found]
            ready = wait(missing, deadline - clock.monotonic())
            assert ready, f"no answer from {len(missing)} of {len(pipes)} ranks within {CALL_S:.0f} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                found[pipe] = _answer(pipe, pipes.index(pipe))
        return [found[pipe] for pipe in pipes]


def _answer(pipe: Connection, rank: int) -> Any:
    try:
        kind, value = json.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError) as error:
        raise AssertionError(f"rank {rank} died without an answer") from error
    assert kind == "returned", f"rank {rank} raised\n{value}"
    return value


def _serve(pipe: Connection, rank: int, limit: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=limit, timeout=timedelta(seconds=CALL_S)
    )
    groups: dict[int, dist.ProcessGroup] = {}
    for size in range(2, limit + 1):
        group = dist.new_group(list(range(size)))
        if isinstance(group, dist.ProcessGroup):  # else this rank is not in it, and gets a number
            groups[size] = group
    while True:
        try:
            path, name, world_size, arguments = json.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):  # the tests are over
            return
        member = Member(rank=rank, world_size=world_size, group=groups.get(world_size))
        try:
            answer = ["returned", _names_of(path)[name](member, *arguments)]
        # The edge of the process: without this the caller would learn that a rank died, and not
        # why.
        except BaseException:
            answer = ["raised", traceback.format_exc()]
        pipe.send_bytes(json.dumps(answer).encode())
