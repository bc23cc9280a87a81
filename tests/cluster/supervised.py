"""However a run of the harness ends, no container, network, process or mount of it is left.

The process that a user starts only waits. Its child plays the scenarios, and all that the child
makes lies in one folder or bears the run's name. At a signal, and at the end, the parent kills the
child with everything that it started, and removes what has the name. So no moment is special: an
image that is being built, a container that is being started, a clean-up that is under way.
"""

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from apt import NotAvailable

from elastic.system.processes import adopt_orphans, children, die_with_parent, kill_children

TEMPORARY = Path(tempfile.gettempdir())  # outside of the run's folder
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KINDS = {  # of what an engine keeps: how to list it, how to remove it
    "ps --all": "rm --force --volumes",
    "network ls": "network rm",
    "volume ls": "volume rm --force",
}
LOOKS = 5
CALL_S = 8.0
ENGINE_S = 5.0
_EXIT_SIGNALLED = 128  # what a shell adds to the number of the signal
NOTHING_TESTED = 2

T = TypeVar("T")


def main(
    about: str | None, cases: Mapping[str, T], play: Callable[[str, list[T]], int], quick: Sequence[str] = ()
) -> int:
    """Play the cases that the command line names, or all of them; `--quick` names some.

    play: takes the run's name, with which everything that it makes begins, and returns the exit
    code.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    wanted = parser.parse_args()
    names = wanted.names or (wanted.quick and quick) or [*cases]
    if unknown := set(names) - set(cases):
        parser.error(f"expected names of {', '.join(cases)}, found {', '.join(sorted(unknown))}")
    return supervised(lambda run: play(run, [cases[name] for name in names]))


def supervised(play: Callable[[str], int]) -> int:
    """The exit code of `play`, which runs in a child with the run's name; after a signal 128 and
    its number.
    """
    run, folder = secrets.token_hex(3), Path(tempfile.mkdtemp(prefix="elastic-cluster-"))
    folder.chmod(0o755)
    signal.pthread_sigmask(signal.SIG_BLOCK, [*STOPS, signal.SIGCHLD])
    adopt_orphans()
    parent = os.getpid()
    child = os.fork()
    if not child:
        _play(play, run, folder, parent)
    code = None
    while code is None:
        number = signal.sigwait([*STOPS, signal.SIGCHLD])
        code = _EXIT_SIGNALLED + number if number in STOPS else _ended(child)
    # An engine still has to remove its containers.
    kill_children(keeps=lambda pid: _name(pid).startswith(("dockerd", "containerd")))
    sweep(run)
    _stop_engine()
    remove(folder)
    if code > _EXIT_SIGNALLED:
        print("interrupted; no container, network, process or mount is left", file=sys.stderr)
    return code


def _play(play: Callable[[str], int], run: str, folder: Path, parent: int) -> None:
    """In the child. Ctrl-C does not reach its session."""
    os.setsid()
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [*STOPS, signal.SIGCHLD])
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    code = 1
    try:
        code = play(run)
    except NotAvailable as reason:
        code = NOTHING_TESTED
        print(f"\nNOTHING WAS TESTED, BECAUSE NOTHING CAN BE HERE: {reason}\n", file=sys.stderr)
    # The edge of the process: its error would be lost.
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(child: int) -> int | None:
    """The exit code of the child; None while it runs. Orphans are reaped as well."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if found[0] == child:
                code = os.waitstatus_to_exitcode(found[1])
                return code if code >= 0 else _EXIT_SIGNALLED - code
    return None


def sweep(name: str) -> None:
    """Remove all containers, networks, volumes and links of this name.

    A command that was killed may have asked the engine for something that is there only a moment
    later, so it looks until nothing is there, and once more.
    """
    for look in range(LOOKS):
        found = [
            (remove, names)
            for ls, remove in KINDS.items()
            if (names := _output("docker", *ls.split(), "--quiet", "--filter", f"name=elastic-{name}"))
        ]
        for remove, names in found:
            _output("docker", *remove.split(), *names.split())
        if not found and look:
            break
        time.sleep(0.2)
    for line in _output("iptables", "--wait", "-S", "FORWARD").splitlines():
        if f" el{name}" in line:
            _output("iptables", "--wait", "-D", *line.split()[1:])
    for line in _output("ip", "-brief", "link").splitlines():
        if line.startswith(f"el{name}"):
            _output("ip", "link", "delete", line.split()[0].partition("@")[0])


def _stop_engine() -> None:
    """One that the child started; it then is a child of this process."""
    for pid in [pid for pid in children() if _name(pid) == "dockerd"]:
        os.kill(pid, signal.SIGTERM)
        end_s = time.monotonic() + ENGINE_S
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < end_s:
            time.sleep(0.05)
    kill_children()


def remove(folder: Path) -> None:
    """With what is mounted in it."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in reversed(mounted):
        if Path(place).is_relative_to(folder):
            _output("umount", "--lazy", place)
    shutil.rmtree(folder, ignore_errors=True)


def keep(name: str, *folders: Path) -> Path:
    """A copy of what these folders hold, which outlives the run."""
    kept = Path(tempfile.mkdtemp(prefix=f"elastic-failed-{name}-", dir=TEMPORARY))
    for folder in folders:
        with suppress(shutil.Error):  # a socket cannot be copied; all else was
            shutil.copytree(folder, kept, dirs_exist_ok=True)
    return kept


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _output(*words: str) -> str:
    """Of a command; empty where it fails, or there is none."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=CALL_S).stdout
    return ""
