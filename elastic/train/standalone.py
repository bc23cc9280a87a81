"""Without an agent (plain python, or torchrun) a recipe runs all the same.

Rank 0 owns the uploader, and each worker its own control page. SIGTERM and the first Ctrl-C in the
loop ask for a drain. Nothing but torchrun restarts workers here, and no snapshot survives them.
"""

import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from elastic.checkpoint.newest_generation import newest_generation
from elastic.config import identity
from elastic.config.environment import AgentLink, Launch
from elastic.config.identity import Identity
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.observe.local_copies import claim_local_copies
from elastic.observe.log_shipper import LogShipper
from elastic.observe.run_uid import claim_uid
from elastic.rendezvous.first_look import Holder
from elastic.rendezvous.lease import LeaseRenewal, RunLease
from elastic.rendezvous.shared_settings import LONGEST_NAME
from elastic.storage.remote import open_store
from elastic.storage.store import create_or_read, read_small
from elastic.system import forked_child, interrupt
from elastic.system.addresses import new_node_id
from elastic.system.clock import SystemClock
from elastic.system.control_page import ControlPage
from elastic.system.scratch import open_scratch
from elastic.system.untrusted import printable
from elastic.train.groups import ProcessGroups
from elastic.uploader.client import UploaderProcess
from elastic.uploader.protocol import UploaderConfig

KEEP_ALIVE_S = 2.0  # of the run directory's lease
_at_end: list[Callable[[], object]] = []  # of this process; the last one goes first


class CtrlC:
    """In the loop the first Ctrl-C asks for a drain; any other one ends the process at once.

    A KeyboardInterrupt would pass through this library's own frames, and then wait for threads, for
    peers and for the uploader.
    """

    def __init__(self) -> None:
        self._page: ControlPage | None = None
        self._local_rank = 0
        self._at_end: list[Callable[[], object]] = []

    def handle(self) -> None:
        forked_child.handle_signal(signal.SIGINT, lambda _number, _frame: self._received())

    def watch(self, page: ControlPage, local_rank: int) -> None:
        self._page, self._local_rank = page, local_rank

    def before_end(self, function: Callable[[], object]) -> None:
        self._at_end.append(function)

    def _received(self) -> None:
        page, rank = self._page, self._local_rank
        if page is not None and page.drain:
            self._end("interrupted; the same command resumes from the newest checkpoint")
        if page is not None and page.open_step(rank) is None and page.step(rank):
            self._end("interrupted after the loop, whose last state is saved")
        if page is None or page.open_step(rank) is None:
            self._end(interrupt.SENTENCE)
        page.drain = True
        _write("stopping after this step; once more to stop at once")

    def _end(self, sentence: str) -> NoReturn:
        for function in reversed(self._at_end):
            with suppress(Exception):  # nothing may keep the process
                function()
        with suppress(Exception):  # the handler may have come into the middle of a print
            sys.stdout.flush()
        _write(sentence)
        os._exit(interrupt.EXIT_CTRL_C)


def _write(line: str) -> None:
    """Also from the middle of a print, which a second one would not survive."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def end(code: int) -> NoReturn:
    """Without finalization, which could wait for peers that are gone. The saves in hand are
    finished as at any other exit, and the next command finds the lease free.
    """
    if not forked_child.is_one():
        for function in reversed(_at_end):
            with suppress(Exception):  # nothing may keep the process
                function()
    forked_child.end(code)


def _at_own_end(function: Callable[[], object]) -> None:
    """At the exit of this process, and where `end` ends it."""
    _at_end.append(function)
    forked_child.at_own_exit(function)


def run_without_agent(launch: Launch, ours: Identity) -> RunDir:
    return RunDir.parse(launch.run_dir or f"runs/{Path(ours.recipe).stem}")


def link_without_agent(launch: Launch, groups: ProcessGroups, ours: Identity, ctrl_c: CtrlC) -> AgentLink:
    """The link that an agent would have passed, made of defaults and ELASTIC_RUN_DIR."""
    run = run_without_agent(launch, ours)
    page = ControlPage.create()
    told = ""
    if groups.rank == 0:
        _take_lease(run, ours, ctrl_c)
        told = claim_uid(run, SystemClock())
    uid = groups.from_rank0(told)
    if groups.local_rank == 0:
        claim_local_copies(run, uid)
    # All copies are claimed once this has ended. The files of a launch are no other one's, also
    # where machines have one name; ranks of one machine follow each other.
    named = groups.all_gather(new_node_id() if groups.local_rank == 0 else "")
    node = next(filter(None, reversed(named[: groups.rank + 1])), "") or new_node_id()
    generation, socket_path = 0, ""
    if groups.rank == 0:
        generation = 1 + newest_generation(run, SystemClock())
        socket_path = _own_uploader(run, ours, uid, node, ctrl_c)
    ctrl_c.watch(page, groups.local_rank)
    return AgentLink(
        pid=os.getpid(),
        node=node,
        run_dir=run.url,
        generation=groups.from_rank0(generation),
        control_page=page.path,
        uploader=socket_path,
        save_every="auto",
        snapshot_every="off",
        audit="auto",
        balance="auto",
        memory="",
        failures=0,
        divergence=None,
        error_folder="",
        faults=None,
        parent=ours.parent,
    )


def _take_lease(run: RunDir, ours: Identity, ctrl_c: CtrlC) -> None:
    """Raises UsageError while agents, or another such process, train in the run directory."""
    place = printable(f"{ours.recipe} without elastic-train on {socket.gethostname()}, pid {os.getpid()}")
    run_lease = RunLease(run.url, SystemClock())
    lease = run_lease.take(
        place[:LONGEST_NAME],
        keep_alive_s=KEEP_ALIVE_S,
        holder=lambda _token: Holder.ELSEWHERE,
        check=partial(_check_claim, run, ours),
        notify=partial(print, flush=True),
    )
    renewal = LeaseRenewal(
        run_lease,
        lease,
        leads=lambda: True,
        is_in=lambda: True,
        on_lost=print,
        reclaim=partial(_claim_again, run, ours),
    )
    _at_own_end(partial(renewal.stop, releases=True))
    ctrl_c.before_end(partial(renewal.stop, releases=True))


def _check_claim(run: RunDir, ours: Identity) -> None:
    """Raises UsageError where the directory is another run's by now, or has none; StoreFailed."""
    there = read_small(open_store(run.url), identity.NAME, SystemClock())
    if there is None:
        raise UsageError(
            f"{run.url} was set aside, moved or removed while this script waited; start it again"
        )
    identity.check(identity.parse(there), ours, run.url)


def _claim_again(run: RunDir, ours: Identity) -> bool:
    there = create_or_read(open_store(run.url), identity.NAME, ours.to_json(), SystemClock())
    return identity.parse(there).run_id == ours.run_id


def _print_problem(text: str) -> None:
    if text:
        print(printable(text), file=sys.stderr, flush=True)


def _own_uploader(run: RunDir, ours: Identity, uid: str, node: str, ctrl_c: CtrlC) -> str:
    if run.is_remote:
        log_shipper = LogShipper(run, node, is_first=lambda: True, is_new=False, print_line=print)
        _at_own_end(lambda: _print_problem(log_shipper.close()))
        log_shipper.start()
    scratch, _ = open_scratch()
    ctrl_c.before_end(partial(shutil.rmtree, scratch, ignore_errors=True))
    config = UploaderConfig.of(run, scratch, run_id=ours.run_id, node=node, keep=3, uid=uid)
    uploader = UploaderProcess.start(config)
    _at_own_end(partial(shutil.rmtree, scratch, ignore_errors=True))
    _at_own_end(partial(uploader.finish, partial(print, flush=True)))
    ctrl_c.before_end(partial(uploader.stop, 0.0))
    os.register_at_fork(after_in_child=uploader.release)
    uploader.wait_ready()
    return uploader.socket_path
