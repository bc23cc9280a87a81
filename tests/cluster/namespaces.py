"""Machines without a container engine: Linux namespaces.

Each has its own processes, network, host name and mounts. They are not containers: there is no
image, no seccomp filter and no limit of memory, and they see the file system of this machine except
where something is mounted over it.
"""

import os
import shlex
import signal
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from apt import NotAvailable, need
from machines import UNPRIVILEGED, Machine, Machines, command, mounts
from supervised import sweep

from elastic.system.processes import children

OWN = "/mnt"  # a machine's private folders are mounted below it
KINDS = ("--fork", "--kill-child", "--pid", "--mount-proc", "--uts", "--ipc", "--net")


class Namespaces(Machines):
    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self._printed = folder / "printed"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _begin(self, machine: Machine) -> None:
        process = self._processes[machine.name] = subprocess.Popen(
            ["unshare", *KINDS, "sh", "-c", "\n".join(self._script(machine))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._printed.open("ab"),
            start_new_session=True,
        )
        # `unshare` makes the namespaces after it has started, and its child is the first process.
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"expected {machine.name} to begin, found {self._printed.read_text()!r}")

    def _script(self, machine: Machine) -> Iterator[str]:
        """The script for sh that the first process runs as root."""
        yield "set -e"
        yield f"hostname {machine.name}"
        yield f"mount --bind {self._hosts} /etc/hosts"
        yield f"mount -t tmpfs -o mode=755 tmpfs {OWN}"
        yield from _made_reachable([*mounts(), *machine.programs])
        for here, there in machine.folders.items():
            assert there.startswith(OWN)
            yield f"mkdir -p {there}; mount --rbind {here} {there}"
        yield "echo ready; exec >/dev/null"
        user = f"--reuid {UNPRIVILEGED} --regid {UNPRIVILEGED} --clear-groups"
        yield f"exec setpriv {user} --no-new-privs --bounding-set=-all {shlex.join(machine.first)}"

    def pid(self, name: str) -> int:
        process = self._processes[name]
        found = children(process.pid) if process.poll() is None else set()
        if not found:
            raise RuntimeError(f"expected {name} to run, but it has ended")
        return found.pop()

    def kill(self, *names: str) -> None:
        for pid in [self.pid(name) for name in names]:
            os.kill(pid, signal.SIGKILL)
        for name in names:
            self._processes[name].wait()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()  # and with it the first process
            process.wait()
        sweep(self.name)


def need_namespaces() -> None:
    """Raises NotAvailable if this process may not make namespaces."""
    for program, package in (("ip", "iproute2"), ("iptables", "iptables"), ("setpriv", "util-linux")):
        need(program, package)
    try:
        command("unshare", *KINDS, "true")
    except RuntimeError as error:
        raise NotAvailable(f"expected to be allowed namespaces of our own, found: {error}") from error


def _made_reachable(paths: Sequence[Path]) -> Iterator[str]:
    """Commands that make `paths` reachable for an unprivileged user.

    Where a parent folder is closed to others (/root, for example), an empty folder is mounted over
    it, and the path is mounted again below that.
    """
    hidden = {path: folder for path in paths if (folder := _closed_parent(path)) is not None}
    for number, path in enumerate(hidden):
        yield f"mkdir -p {OWN}/kept/{number}; mount --rbind {path} {OWN}/kept/{number}"
    for folder in dict.fromkeys(hidden.values()):
        yield f"mount -t tmpfs -o mode=755 tmpfs {folder}"
    for number, path in enumerate(hidden):
        yield f"mkdir -p {path}; mount --rbind {OWN}/kept/{number} {path}"


def _closed_parent(path: Path) -> Path | None:
    folders = [*reversed(path.parents), path]
    return next((folder for folder in folders if not folder.stat().st_mode & stat.S_IXOTH), None)
