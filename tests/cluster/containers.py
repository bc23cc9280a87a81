"""Machines that are Docker containers on one bridge."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network

from commands import docker
from image import ROOT, mounts
from machines import UNPRIVILEGED, Machine, free_subnet
from supervised import sweep


class Containers:
    def __init__(self, image: str, name: str) -> None:
        self._image = image
        self._id = name
        self._network = f"elastic-{name}"
        self._addresses: dict[str, str] = {}

    def open(self) -> IPv4Network:
        return free_subnet(lambda subnet: docker("network", "create", "--subnet", str(subnet), self._network))

    def make(self, machines: Sequence[Machine]) -> None:
        with ThreadPoolExecutor() as several:
            list(several.map(self._make, machines))

    def pid(self, name: str) -> int:
        pid = int(docker("inspect", "--format", "{{.State.Pid}}", self._name(name)))
        if not pid:
            raise RuntimeError(f"expected {name} to run, but it has ended")
        return pid

    def kill(self, *names: str) -> None:
        docker("kill", *map(self._name, names))

    def revive(self, *names: str) -> None:
        docker("start", *map(self._name, names))

    def remove(self, name: str) -> None:
        docker("rm", "--force", "--volumes", self._name(name))

    def execute(self, name: str, *words: str) -> None:
        docker("exec", "--workdir", str(ROOT), self._name(name), *words)

    def exit_code(self, name: str) -> int:
        """Of its first process, which has ended."""
        return int(docker("wait", self._name(name)))

    def pause(self, *names: str) -> None:
        for name in map(self._name, names):
            # A busy machine may be too slow for the engine's own limit.
            for is_last in (False, False, True):
                docker("pause", name, check=is_last)
                if docker("inspect", "--format", "{{.State.Paused}}", name) == "true":
                    break

    def unpause(self, *names: str) -> None:
        docker("unpause", *map(self._name, names))

    def unplug(self, name: str) -> None:
        docker("network", "disconnect", self._network, self._name(name))

    def plug(self, name: str) -> None:
        docker("network", "connect", "--ip", self._addresses[name], self._network, self._name(name))

    def close(self) -> None:
        sweep(self._id)

    def _make(self, machine: Machine) -> None:
        self._addresses[machine.name] = machine.address
        options = [
            *("--name", self._name(machine.name), "--hostname", machine.name),
            *("--network", self._network, "--ip", machine.address, "--network-alias", machine.name),
            *("--user", str(UNPRIVILEGED), "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges"),
            "--init" if machine.has_init else "--read-only",
        ]
        for here, there in machine.folders.items():
            options += ["--volume", f"{here}:{there}"]
        for path in (*mounts(), *machine.programs):
            options += ["--volume", f"{path}:{path}:ro"]
        if machine.memory_mib is not None:
            # Without swap: else a node becomes slow instead of being killed.
            size = f"{machine.memory_mib}m"
            options += ["--memory", size, "--memory-swap", size]
        docker("run", "--detach", *options, self._image, *machine.words)

    def _name(self, name: str) -> str:
        return f"elastic-{self._id}-{name}"
