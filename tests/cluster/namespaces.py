"""Machines without a container engine: Linux namespaces on a bridge.

Each has its own processes, network, host name and mounts. They are not containers: there is no
image and no seccomp filter, and they see the file system of this machine except where something is
mounted over it.
"""

import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network
from pathlib import Path

from apt import NotAvailable, need
from machines import IDLE, UNPRIVILEGED, Machine, command, free_subnet, mounts
from supervised import CGROUPS, sweep

POLL_S = 0.02
OWN = "/mnt"  # a machine's private folders are mounted below it
# The first process adopts orphans, and `wait` reaps them.
IDLE_FOR_EVER = "while :; do sleep 1000 & wait $!; done"


class Namespaces:
    def __init__(self, name: str) -> None:
        self._bridge = f"el{name}"
        self._folder = Path(tempfile.mkdtemp(prefix="elastic-machines-"))
        self._printed = self._folder / "printed"
        self._hosts = self._folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._machines: dict[str, Machine] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._plugs = 0

    def open(self) -> IPv4Network:
        command("ip", "link", "add", self._bridge, "type", "bridge")
        command("ip", "link", "set", self._bridge, "up")
        # A Docker engine that once ran here may have left the policy to forward nothing.
        passing = ("-i", self._bridge, "-o", self._bridge, "-j", "ACCEPT")
        command("iptables", "--wait", "-I", "FORWARD", *passing)
        return free_subnet(self._take)

    def _take(self, subnet: IPv4Network) -> None:
        if command("ip", "route", "show", "root", str(subnet)):
            raise RuntimeError(f"{subnet} is in use")
        command("ip", "address", "add", f"{subnet[1]}/{subnet.prefixlen}", "dev", self._bridge)

    def make(self, machines: Sequence[Machine]) -> None:
        with self._hosts.open("a") as hosts:
            hosts.writelines(f"{machine.address} {machine.name}\n" for machine in machines)
        for machine in machines:
            self._machines[machine.name] = machine
            self._begin(machine)

    def pid(self, name: str) -> int:
        children = _children(self._processes[name].pid)
        if self._processes[name].poll() is not None or not children:
            raise RuntimeError(f"expected {name} to run, but it has ended")
        return children[0]

    def kill(self, *names: str) -> None:
        for pid in [self.pid(name) for name in names]:
            os.kill(pid, signal.SIGKILL)
        for name in names:
            self._processes[name].wait()

    def revive(self, *names: str) -> None:
        for name in names:
            self._begin(self._machines[name])

    def pause(self, *names: str) -> None:
        self._signal(signal.SIGSTOP, *names)

    def unpause(self, *names: str) -> None:
        self._signal(signal.SIGCONT, *names)

    def _signal(self, number: signal.Signals, *names: str) -> None:
        """To all processes of these machines, also to one that is being forked."""
        for pid in map(self.pid, names):
            # Within its namespace -1 means all processes but the first one and the sender.
            command("nsenter", "--target", str(pid), "--pid", "sh", "-c", f"kill -{int(number)} -1")
            os.kill(pid, number)

    def unplug(self, name: str) -> None:
        command("nsenter", "--target", str(self.pid(name)), "--net", "ip", "link", "delete", "eth0")

    def plug(self, name: str) -> None:
        self._plugs += 1
        here, pid = f"{self._bridge}.{self._plugs}", str(self.pid(name))
        command("ip", "link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", pid)
        command("ip", "link", "set", here, "master", self._bridge, "up")
        inside = ("nsenter", "--target", pid, "--net", "ip")
        command(*inside, "link", "set", "lo", "up")
        command(*inside, "address", "add", f"{self._machines[name].address}/24", "dev", "eth0")
        command(*inside, "link", "set", "eth0", "up")

    def close(self) -> None:
        for process in self._processes.values():
            for pid in _children(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()
        sweep(self._bridge.removeprefix("el"))
        shutil.rmtree(self._folder)

    def _begin(self, machine: Machine) -> None:
        kinds = ("--pid", "--mount-proc", "--uts", "--ipc", "--net")
        process = subprocess.Popen(
            ["unshare", "--fork", "--kill-child", *kinds, "sh", "-c", "\n".join(self._script(machine))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._printed.open("ab"),
            start_new_session=True,
        )
        self._processes[machine.name] = process
        # `unshare` makes the namespaces after it has started, and its child is the first process.
        while process.poll() is None and not _children(process.pid):
            time.sleep(POLL_S)
        if machine.memory_mib is not None:
            self._limit(machine.name, machine.memory_mib)
        self.plug(machine.name)
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
        yield "until ip -4 address show dev eth0 2>/dev/null | grep -q inet; do sleep 0.02; done"
        yield "echo ready; exec >/dev/null"
        if machine.words == IDLE:
            yield IDLE_FOR_EVER
        else:
            user = f"--reuid {UNPRIVILEGED} --regid {UNPRIVILEGED} --clear-groups"
            yield f"exec setpriv {user} --no-new-privs --bounding-set=-all {shlex.join(machine.words)}"

    def _limit(self, name: str, memory_mib: int) -> None:
        """Make a control group (version 1 or 2).

        Processes that enter the machine enter the group too.
        """
        is_first = (CGROUPS / "memory").is_dir()
        group = (CGROUPS / "memory" if is_first else CGROUPS) / f"{self._bridge}-{name}"
        limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if is_first else ("memory.max",)
        try:
            group.mkdir(exist_ok=True)
            for limit in limits:
                if (group / limit).exists():
                    (group / limit).write_text(str(memory_mib * 2**20))
            (group / "cgroup.procs").write_text(str(self.pid(name)))
        except OSError as error:
            raise RuntimeError(f"expected to limit the memory of {name}, found: {error}") from error


def need_namespaces() -> None:
    """Raises NotAvailable if this process may not make namespaces."""
    for program, package in (("ip", "iproute2"), ("iptables", "iptables"), ("setpriv", "util-linux")):
        need(program, package)
    try:
        command("unshare", "--fork", "--pid", "--mount-proc", "--uts", "--ipc", "--net", "true")
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


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
