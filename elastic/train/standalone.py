"""Without an agent (plain python, or torchrun) a recipe runs all the same.

Rank 0 owns the uploader, and each worker its own control page. SIGTERM and the first Ctrl-C in the
loop ask for a drain. A process that ends, by whatever way, finishes its saves and frees the run
directory; Ctrl-C alone gives up the saves. Nothing but torchrun restarts workers here, and
no snapshot survives them.
"""

import atexit
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import NoReturn

from elastic.checkpoint.find_parent import parent_of
from elastic.checkpoint.provenance import claim_local_copies, claim_uid, newest_generation
from elastic.config import identity
from elastic.config.environment import AgentLink, Launch
from elastic.config.identity import Identity
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_FAILED, ElasticError, shown_code
from elastic.observe.console import ConsoleFollower
from elastic.observe.log_shipper import LogShipper
from elastic.rendezvous import meeting_place
from elastic.rendezvous.group import LONGEST_NAME
from elastic.rendezvous.heartbeat import Heartbeat
from elastic.rendezvous.meeting_place import ALONE, Place, config_of
from elastic.storage.remote import open_store
from elastic.storage.store import read_small
from elastic.system import command_end, forked_child
from elastic.system.addresses import new_node_id
from elastic.system.clock import SystemClock
from elastic.system.control_page import ControlPage
from elastic.system.files import open_scratch
from elastic.system.untrusted import printable
from elastic.train.groups import ProcessGroups
from elastic.uploader.client import UploaderProcess
from elastic.uploader.protocol import UploaderConfig
from elastic.worker import script_end

KEEP_ALIVE_S, REMOTE_KEEP_ALIVE_S = 2.0, 15.0  # of this process; each heartbeat is a request

_at_end: list[Callable[[], object]] = []  # of this process; the last one goes first
_at_ctrl_c: list[Callable[[], object]] = []  # likewise, in place of those
_pages: list[tuple[ControlPage, int]] = []  # at most one, with the local rank


def begin(launch: Launch, run: RunDir, groups: ProcessGroups, ours: Identity) -> Identity:
    """Take the run directory; the identity with the state of another run that this one begins from.

    From here on the end of the script, by whatever way, is that of the run. Raises UsageError, also
    while agents, or another such process, train in the run directory.
    """
    # An agent's workers end by os._exit, without finalization.
    atexit.register(_before_finalization, groups)
    script_end.watch_exit_codes()
    script_end.fail_with(_fail)
    if groups.rank == 0:
        there = read_small(open_store(run.url), identity.NAME, SystemClock())
        recorded = None if there is None else identity.parse(there)
        ours = replace(ours, parent=parent_of(recorded, launch.origin, run, SystemClock(), print))
        _take_place(run)
    return replace(ours, parent=groups.from_rank0(ours).parent)


def link(run: RunDir, groups: ProcessGroups, ours: Identity) -> AgentLink:
    """The link that an agent would have passed, of its defaults."""
    page = ControlPage.create()
    uid = groups.from_rank0(claim_uid(run, SystemClock()) if groups.rank == 0 else "")
    if groups.local_rank == 0:
        claim_local_copies(run, uid, SystemClock())
    # All copies are claimed once this has ended. The files of a launch are no other one's, also
    # where machines have one name; ranks of one machine follow each other.
    named = groups.all_gather(new_node_id() if groups.local_rank == 0 else "")
    node = next(filter(None, reversed(named[: groups.rank + 1])))
    generation, socket_path = 0, ""
    if groups.rank == 0:
        generation = 1 + newest_generation(run, SystemClock())
        socket_path = _own_uploader(run, ours, uid, node)
    _pages.append((page, groups.local_rank))
    return AgentLink(
        pid=os.getpid(),
        node=node,
        generation=groups.from_rank0(generation),
        control_page=page.path,
        uploader=socket_path,
        parent=ours.parent,
    )


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: this library's errors end the process with their message and exit code."""
    error = script_end.explain(error)
    if not isinstance(error, ElasticError):
        sys.__excepthook__(kind, error, trace)
        return
    # torch's hook, which calls this, collects all output to sys.stderr until it returns,
    # and this one does not.
    last_words = f"error: {error}\n{script_end.own_line(trace)}"
    print(printable(last_words.rstrip()), file=sys.__stderr__, flush=True)
    # A normal exit would wait for threads that wait for peers that are gone, and an excepthook
    # cannot set the exit code otherwise.
    _end(shown_code(error.exit_code))


def handle_ctrl_c() -> None:
    """A KeyboardInterrupt would pass through this library's own frames, and then wait for threads,
    for peers and for the uploader.
    """
    forked_child.handle_signal(signal.SIGINT, _interrupted)


def _interrupted(_number: int, _frame: object) -> None:
    """In the loop the first Ctrl-C asks for a drain; any other one ends the process at once."""
    sentence = command_end.SENTENCE
    for page, rank in _pages:
        is_in_loop = page.open_step(rank) is not None
        if is_in_loop and not page.drain:
            page.drain = True
            _write("stopping after this step; once more to stop at once")
            return
        if is_in_loop or page.step(rank):
            sentence = "interrupted; the same command resumes from the newest checkpoint"
    _call(reversed([sys.stdout.flush, *_at_ctrl_c]))  # it may have come into the middle of a print
    _write(sentence)
    os._exit(command_end.EXIT_CTRL_C)


def _write(line: str) -> None:
    """Also from the middle of a print, which a second one would not survive. "" is no line."""
    with suppress(OSError):
        os.write(2, f"{printable(line)}\n".encode() if line else b"")


def _end(code: int) -> NoReturn:
    """Without finalization, which could wait for peers that are gone. The saves in hand are
    finished as at any other exit, and the next command finds the directory free.
    """
    if not forked_child.is_one():
        _call(reversed(_at_end))
    forked_child.end(code)


def _call(functions: Iterable[Callable[[], object]]) -> None:
    for function in functions:
        with suppress(Exception):  # nothing may keep the process
            function()


def _fail(error: BaseException) -> NoReturn:
    explain(type(error), error, error.__traceback__)
    _end(EXIT_FAILED)


def end_script() -> None:
    """At the end of the interpreter: as a worker of an agent does after the script's last line."""
    if script_end.has_failed():
        return
    try:
        script_end.reached()
    except SystemExit as drained:  # the recipe caught it
        _end(drained.code if isinstance(drained.code, int) else EXIT_FAILED)
    except BaseException as error:  # an exit function's exception would not change the exit code
        _fail(error)


def _before_finalization(groups: ProcessGroups) -> None:
    """Close the groups, whose threads would not survive it."""
    if not forked_child.is_one():
        _call(reversed(_at_end))
        groups.close()
    elif groups.store is not None:  # the child has no such threads, and cannot close the groups
        forked_child.end(script_end.exit_code())


def _take_place(run: RunDir) -> None:
    clock, keep_alive_s = SystemClock(), REMOTE_KEEP_ALIVE_S if run.is_remote else KEEP_ALIVE_S
    who = printable(f"plain python or torchrun on {socket.gethostname()}, pid {os.getpid()}")
    ours = Place(kind=ALONE, who=who[:LONGEST_NAME], keep_alive_s=keep_alive_s)
    # The directory is claimed once this process has its place.
    meeting_place.Watch(run=run, clock=clock, notify=partial(print, flush=True)).take(ours)
    heartbeat = Heartbeat(config_of(run, ours).open({}), ours.token, keep_alive_s=keep_alive_s, notify=print)
    heartbeat.start()
    release = partial(meeting_place.release, run, ours, clock)
    _at_end.extend((release, heartbeat.stop))
    _at_ctrl_c.extend((release, heartbeat.stop))


def _own_uploader(run: RunDir, ours: Identity, uid: str, node: str) -> str:
    """The path of its socket."""
    if run.is_remote:
        log_shipper = LogShipper(run, node, is_first=lambda: True, print_line=print)
        _at_end.append(lambda: _write(log_shipper.close()))
        log_shipper.start()
    progress = ConsoleFollower(run, node, sys.stderr, SystemClock())  # stdout is the script's own
    progress.start()
    _at_end.append(progress.stop)
    scratch = open_scratch()
    remove = partial(shutil.rmtree, scratch, ignore_errors=True)
    for each in _at_end, _at_ctrl_c:
        each.append(remove)
    uploader = UploaderProcess(
        UploaderConfig(run_url=run.url, scratch=str(scratch), run_id=ours.run_id, node=node, keep=3, uid=uid)
    )
    _at_end.append(partial(uploader.finish, partial(print, flush=True), ended_by="Ctrl-C ends that"))
    _at_ctrl_c.append(partial(uploader.stop, 0.0))
    ended = threading.Event()
    watch = threading.Thread(target=uploader.revive_until, args=(ended, _write), daemon=True)
    watch.start()
    for each in _at_end, _at_ctrl_c:
        each.extend((partial(watch.join, 1.0), ended.set))
    os.register_at_fork(after_in_child=uploader.release)
    return uploader.socket_path
