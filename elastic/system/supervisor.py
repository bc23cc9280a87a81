"""Whatever hangs, the command has ended a moment after its grace, with an exit code that is true.

The process that a user starts only waits. Its child is the agent, which does everything else, and
which may be held by a store, a file system, a library or a console that does not answer. The
supervisor calls none of these. It takes the signals, tells the agent of them, and kills the
rest of the node when its time is over (leave_deadline.py). It does not promise that a killed
process is gone at once: the kernel may hold a process in a system call.
"""

import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from typing import NoReturn

from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, CannotStart
from elastic.system import command_end, stop_signals
from elastic.system.clock import SystemClock
from elastic.system.leave_deadline import LeavePage
from elastic.system.processes import adopt_orphans, children, die_with_parent
from elastic.system.untrusted import printable

LOOK_S = 0.25  # for a notice, which the agent writes into the page, and which sends no signal
KILL_S = 1.0
LAST_LINE_S = 0.5
_monotonic = SystemClock.monotonic
_BY_SIGNAL = 128  # what a shell adds to the number of the signal that ended a program


def supervise(page: LeavePage, warnings: Iterable[signal.Signals]) -> None:
    """Fork: the child goes on as the agent, and this process ends as the agent does.

    warnings: signals that ask this node to leave, beside SIGTERM and SIGINT. Signals that are
    ignored, as `nohup` has SIGHUP ignored, stay so. Call it before any thread starts. Raises
    CannotStart.
    """
    stops = [n for n in (*stop_signals.END, *warnings) if signal.getsignal(n) is not signal.SIG_IGN]
    # One that is ignored, as a parent may hand it on, would have the kernel reap the agent unseen.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*stops, signal.SIGCHLD])
    adopt_orphans()
    supervisor = os.getpid()
    try:
        agent = os.fork()
    except OSError as error:
        raise CannotStart(f"no process can be started for the agent ({error})") from error
    if agent:
        _supervise(agent, page, stops)
    die_with_parent(supervisor)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _supervise(agent: int, page: LeavePage, stops: list[signal.Signals]) -> NoReturn:
    while True:
        left_s = page.deadline.killed_s - _monotonic()
        if left_s <= 0:
            _kill_all(agent)
            line, code = last_word(page)
            _print_if_taken(line)
            os._exit(code)
        found = signal.sigtimedwait([*stops, signal.SIGCHLD], min(left_s, LOOK_S))
        # After SIGCONT, CPython 3.11 may answer with a signal of number 0 for a time-out.
        if found is None or found.si_signo not in signal.valid_signals():
            continue
        if found.si_signo == signal.SIGCHLD:
            _end_if_dead(agent)
            continue
        page.signalled(found.si_signo, _monotonic())
        os.kill(agent, found.si_signo)  # it wakes, or has not begun yet, and ends as it likes


def last_word(page: LeavePage) -> tuple[str, int]:
    """The line and the exit code for an agent that could not end by itself in time."""
    if page.code is None:
        is_ctrl_c = page.number == signal.SIGINT
        return command_end.SENTENCE, command_end.EXIT_CTRL_C if is_ctrl_c else EXIT_INTERRUPTED
    line = f"elastic-train: this node did not leave in time ({printable(str(page.reason))})"
    return line + ("" if page.code == EXIT_COMPLETE else "; the same command resumes"), page.code


def _end_if_dead(agent: int) -> None:
    """Orphans of the agent are this process's children, and are reaped here as well."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            pid, status = found
            if pid == agent:
                _end_as(os.waitstatus_to_exitcode(status))


def _end_as(code: int) -> NoReturn:
    if code < 0:
        number = -code
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
        # The kernel does not let the first process of a container kill itself.
        os._exit(_BY_SIGNAL - code)
    os._exit(code)


def _kill_all(agent: int) -> None:
    """The fork server and the workers die with the agent, and all else becomes a child of this
    process once its parent is dead.
    """
    end_s, left = _monotonic() + KILL_S, {agent}
    while left and _monotonic() < end_s:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait([signal.SIGCHLD], 0.05)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        left = children()


def _print_if_taken(line: str) -> None:
    """A pipe without a reader, and a closed terminal, do not hold this process."""
    taken = select.poll()
    taken.register(2, select.POLLOUT)
    if taken.poll(1000 * LAST_LINE_S):
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())
