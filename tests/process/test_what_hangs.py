"""Whatever hangs, and whenever: SIGTERM is honoured in time, and the run goes on to the same bits.

A table of what can hang and of the moments in which it does. `make hangs` plays all of it, three
cells at a time; all tests play some of its cells.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import EtcdServers
from s3_server import S3Server

GRACE_S, OVER_S = 6.0, 5.0
TINY = Path(__file__).parent / "recipes" / "tiny.py"
MIDDLE, LAST = 6, 24
START, RENDEZVOUS, TRAINING, DRAIN, SAVE, AFTER = WHEN = (
    "start",
    "rendezvous",
    "training",
    "drain",
    "last save",
    "after the last step",
)
IN_WORKERS = {START, RENDEZVOUS, SAVE, AFTER}  # no worker computes a step then
# What hangs: in which of its cells all tests play it, and the moments that it does not know.
ROWS: dict[str, tuple[str | None, set[str]]] = {
    "object store": (None, set()),
    "agent": (TRAINING, set()),
    "etcd": (DRAIN, set()),
    "fork server": (RENDEZVOUS, {SAVE, AFTER}),
    "uploader": (DRAIN, set()),
    "collective": (TRAINING, IN_WORKERS),
    "c-code": (None, IN_WORKERS),
}
CELLS = [
    pytest.param(what, when, id=f"{what}, {when}", marks=[] if when == played else [pytest.mark.hangs])
    for what, (played, unknown) in ROWS.items()
    for when in WHEN
    if when not in unknown
]


class Cell:
    """One run in which something hangs, from `hang` until `heal`."""

    def __init__(self, what: str, when: str, drill: Any) -> None:
        self.what, self.when, self.drill = what, when, drill
        self.flag = drill.gates / "hang"
        self.run, self.ranks = drill.run.url, 1
        self.options: list[str] = ["--min-nodes", "3"] if when == RENDEZVOUS else []
        self.env = {"TINY_HANGS": what}
        self.stopped: list[int] = []
        self.servers: list[Any] = []
        if what == "object store":
            self.servers.append(store := S3Server(drill.folder))
            self.run, self.env = f"{store.bucket()}/run", self.env | store.environ
        if what == "etcd":
            self.servers.append(etcd := EtcdServers(drill.folder))
            self.options += ["--rdzv-backend", "etcd", "--rdzv-endpoint", etcd.endpoints]
        if what == "collective":
            self.options += ["--nproc-per-node", "2"]
            self.ranks = 2

    def start(self) -> Any:
        words = [str(TINY), "--run-dir", self.run, "--save-every", "4steps", "--grace", f"{GRACE_S:g}"]
        return self.drill.command([*words, "--max-nodes", "3", *self.options], self.env)

    def hang(self, agent: Any) -> None:
        self.flag.touch()
        match self.what:
            case "object store":
                self._stop(self.servers[0]._process.pid)
            case "etcd":
                self.servers[0].freeze(0)
            case "agent":
                self._stop(agent.pid)
            case "fork server":
                self._stop(self.drill.waits_for(lambda: self.drill.fork_server_of(agent), "a fork server"))
            case "uploader":
                self._stop(self.drill.waits_for(lambda: self.drill.uploader_of(agent), "an uploader"))
            case "collective":
                self._stop(self.drill.pid_of_rank(1, generation=1))
            case _:  # c-code: the recipe finds the flag
                pass

    def _stop(self, pid: int) -> None:
        self.stopped.append(pid)
        os.kill(pid, signal.SIGSTOP)

    def heal(self) -> None:
        """All that was begun ends, and nothing hangs any more."""
        self.flag.unlink(missing_ok=True)
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.what == "etcd":
            self.servers[0]._processes[0].send_signal(signal.SIGCONT)
        for agent in self.drill.agents:
            if agent.process.poll() is None:
                agent.process.kill()
                agent.wait()
        self.drill.all_are_gone()
        self.options = []
        if self.what == "etcd":
            self.options = ["--rdzv-backend", "etcd", "--rdzv-endpoint", self.servers[0].endpoints]

    def close(self) -> None:
        for server in self.servers:
            server.close()


def lead_to(when: str, cell: Cell, agent: Any, asks: Callable[[], None]) -> None:
    """Bring the run to the moment, let it hang there, and ask the agent to leave."""
    drill = cell.drill
    if when == START:
        cell.hang(agent)
        assert agent.pid
        asks()
    elif when == RENDEZVOUS:
        drill.waits_for(lambda: drill.uploader_of(agent), "an agent that is about to meet the others")
        cell.hang(agent)
        asks()
    elif when in (TRAINING, DRAIN):
        drill.stands(MIDDLE, cell.ranks)
        if when == DRAIN:
            asks()
            drill.waits_for(
                lambda: "finish the same step" in agent.output or drill.events("drain_requested"), "a drain"
            )
        cell.hang(agent)
        if when == TRAINING and cell.what == "c-code":
            drill.open(MIDDLE)
            drill.waits_for((drill.gates / "held").exists, "a worker that is held")
        if when == TRAINING:
            asks()
        drill.open(MIDDLE)
    else:
        drill.open(MIDDLE)
        drill.stands(LAST, cell.ranks)
        if when == AFTER:
            drill.open(LAST)
            drill.waits_for((drill.gates / f"at-{AFTER}-rank0").exists, "the end of the loop")
        cell.hang(agent)
        asks()
        drill.open(LAST if when == SAVE else AFTER)


@pytest.mark.parametrize(("what", "when"), CELLS)
def test_sigterm_is_honoured_whatever_hangs(drill: Any, undisturbed: Any, what: str, when: str) -> None:
    """The agent has left at most five seconds after its grace, with an exit code that is true, and
    the same command goes on to the digest of a run in which nothing hung.
    """
    with closing(Cell(what, when, drill)) as cell:
        drill.shut(MIDDLE, LAST, AFTER)
        if when == START and what in ("object store", "etcd"):
            cell.hang(None)
        agent = cell.start()
        asked: list[float] = []

        def asks() -> None:
            asked.append(time.monotonic())
            agent.signal(signal.SIGTERM)

        lead_to(when, cell, agent, asks)
        code = agent.wait()
        took_s = time.monotonic() - asked[0]
        codes = {75} if when in (START, RENDEZVOUS) else {0, 1, 75}
        assert code in codes, agent.output
        assert took_s <= GRACE_S + OVER_S, f"{took_s:.1f} s after SIGTERM\n{agent.output}"
        for gate in (MIDDLE, LAST, AFTER):
            drill.open(gate)
        cell.heal()
        cell.start().ends_with(0)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cell.env.items():
                patch.setenv(name, value)
            _, found = drill.inspects("report", cell.run)
        assert found["final_digest"] == undisturbed.digest
        lost = [each["lost_steps"] for each in found["recoveries"][-1:]]  # by the second command
        assert code != 75 or not any(lost), "the exit code says that nothing is lost"
