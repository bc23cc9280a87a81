"""Machines that are Docker containers; or one sentence says why none can run here.

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
from pathlib import Path

from apt import NotAvailable, need
from machines import ROOT, UNPRIVILEGED, Machine, Machines, command, mounts
from supervised import sweep

START_S = 60.0
BASE, NODE = "elastic-train-base", "elastic-train-node"
PULLED = "python:3.11-slim"
# This package depends on all libraries that any Python interpreter may load, whatever the release
# names them.
INCLUDE = "python3"


class Containers(Machines):
    def _begin(self, machine: Machine) -> None:
        docker("rm", "--force", "--volumes", self.container(machine.name), check=False)
        options = [
            *("--name", self.container(machine.name), "--hostname", machine.name, "--network", "none"),
            *("--user", str(UNPRIVILEGED), "--cap-drop", "ALL"),
            *("--security-opt", "no-new-privileges", "--volume", f"{self._hosts}:/etc/hosts:ro"),
            *(["--read-only"] if machine.is_pod else []),
        ]
        for here, there in machine.folders.items():
            options += ["--volume", f"{here}:{there}"]
        for path in (*mounts(), *machine.programs):
            options += ["--volume", f"{path}:{path}:ro"]
        if machine.memory_mib is not None:
            # Without swap: else a node becomes slow instead of being killed.
            size = f"{machine.memory_mib}m"
            options += ["--memory", size, "--memory-swap", size]
        docker("run", "--detach", *options, NODE, *machine.first)

    def pid(self, name: str) -> int:
        pid = int(docker("inspect", "--format", "{{.State.Pid}}", self.container(name)))
        if not pid:
            raise RuntimeError(f"expected {name} to run, but it has ended")
        return pid

    def kill(self, *names: str) -> None:
        docker("kill", *map(self.container, names))

    def execute(self, name: str, *words: str) -> None:
        docker("exec", "--workdir", str(ROOT), self.container(name), *words)

    def container(self, name: str) -> str:
        return f"elastic-{self.name}-{name}"

    def close(self) -> None:
        sweep(self.name)


def docker(*words: str, check: bool = True) -> str:
    """The classic builder needs no plugin, and our Dockerfiles need no other."""
    return command("docker", *words, check=check, env={"DOCKER_BUILDKIT": "0"})


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


def make_image() -> None:
    """Build the image that can run this machine's interpreter, if it is missing.

    Raises NotAvailable.
    """
    if not docker("images", "--quiet", BASE):
        _make_base()
    words = ("--force-rm", "--target", "node", "--build-arg", f"BASE={BASE}", "--tag", NODE)
    docker("build", *words, str(ROOT))


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
