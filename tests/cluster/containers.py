"""Machines that are Docker containers on one bridge; or one sentence says why none can run here.

If no engine runs and this process is root, an engine is installed from the distribution's packages
and started. It ends with the run (supervised.py); installed packages stay. Nodes share folders of
this machine, so an engine on another one does not serve.

The nodes' image contains nothing of the project. If no image can be pulled, the base image is made
of the distribution's packages. It is kept under a tag of its own, and made again only if that tag
is removed.
"""

import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from pathlib import Path

from apt import NotAvailable, need
from machines import ROOT, UNPRIVILEGED, Machine, command, docker, free_subnet, mounts
from supervised import sweep

START_S = 60.0
BASE, NODE = "elastic-train-base", "elastic-train-node"
PULLED = "python:3.11-slim"
# This package depends on all libraries that any Python interpreter may load, whatever the release
# names them.
INCLUDE = "python3"


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

    def wait_command(self, name: str) -> str:
        """It prints the exit code of the first process, once that has ended."""
        return f"docker wait {self._name(name)}"

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


def engine() -> str:
    """The version of the engine that answers, which is started where there is none."""
    if version := _version():
        return version
    need("dockerd", "docker.io")
    need("iptables", "iptables")
    log = Path(tempfile.gettempdir()) / "dockerd.log"
    with log.open("wb") as out:
        daemon = subprocess.Popen(["dockerd"], stdout=out, stderr=out, start_new_session=True)
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and daemon.poll() is None:
        if version := _version():
            return version
        time.sleep(0.2)
    printed = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
    raise NotAvailable(
        f"expected dockerd to answer within {START_S:.0f} s, found: {printed or 'nothing printed'}"
    )


def _version() -> str:
    try:
        return docker("version", "--format", "{{.Server.Version}}", check=False)
    except RuntimeError:
        return ""


def node_image() -> str:
    """The tag of an image that can run this machine's interpreter.

    Builds it if it is missing. Raises NotAvailable.
    """
    if not docker("images", "--quiet", BASE):
        _make_base()
    words = ("--force-rm", "--target", "node", "--build-arg", f"BASE={BASE}", "--tag", NODE)
    docker("build", *words, str(ROOT))
    return NODE


def _make_base() -> None:
    print("making a base image of the distribution's packages; about a minute, once", flush=True)
    need("debootstrap", "debootstrap")
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "stable")
    folder = Path(tempfile.mkdtemp(prefix="elastic-base-"))
    # From where this machine installs its own packages, where apt-get knows.
    known = command("apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", check=False)
    mirror = [url for line in known.splitlines() for name, url in [line.split()] if name == codename][:1]
    try:
        command("debootstrap", "--variant=minbase", f"--include={INCLUDE}", codename, str(folder), *mirror)
    except RuntimeError as error:
        raise NotAvailable(
            f"expected a base system by debootstrap, found: {str(error)[-300:]}; "
            f"or make one by hand: docker pull {PULLED} && docker tag {PULLED} {BASE}"
        ) from error
    # This machine's interpreter may be mounted below /root, and nodes run as another user.
    (folder / "root").chmod(0o755)
    command("bash", "-c", f"set -o pipefail; tar -C {folder} -c . | docker import - {BASE}")
