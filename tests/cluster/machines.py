"""Machines that are Docker containers, on a network of their own: a bridge of this machine, with a
cable to each of them; or one sentence says why none can run here.

If no engine runs, one is installed from the distribution's packages and started. It ends with the
run (supervised.py); installed packages stay. Machines share folders of this one, so an engine
elsewhere does not serve. They see interpreter, packages and sources of this machine, read-only at
their own paths: a change needs no new image, and no image needs a copy of torch. If no image can be
pulled, the base image is made of the distribution's packages. It is kept under a tag of its own,
and made again only if that tag is removed. All methods raise RuntimeError; after `close` nothing is
left, even if `make` failed half-way.
"""

import itertools
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from apt import NotAvailable, need
from gates import wait_for
from supervised import sweep

START_S = 60.0
BASE, NODE = "elastic-train-base", "elastic-train-node"
PULLED = "python:3.11-slim"
# This package depends on all libraries that any Python interpreter may load, whatever the release
# names them.
INCLUDE = "python3"
ROOT = Path(__file__).parents[2]
UNPRIVILEGED = 1000
# In the private range, and rarely used by home and company networks.
SUBNETS = IPv4Network("10.208.0.0/12")
NETWORK_TRIES = 20


class Machines:
    def __init__(self, name: str, folder: Path) -> None:
        """name: what all that is made here begins with (supervised.py)."""
        self.name, self._bridge, self._hosts = name, f"el{name}", folder / "hosts"
        self._made: dict[str, tuple[str, Sequence[str], Path, Sequence[str]]] = {}
        self._cables = itertools.count()

    def open(self) -> IPv4Network:
        """The subnet that the machines have for themselves."""
        command("ip", "link", "add", self._bridge, "type", "bridge")
        # A container engine has the policy to forward nothing.
        passing = ("-i", self._bridge, "-o", self._bridge, "-j", "ACCEPT")
        command("iptables", "--wait", "-I", "FORWARD", *passing)
        for _ in range(NETWORK_TRIES):
            start = int(SUBNETS[0]) + 256 * secrets.randbelow(SUBNETS.num_addresses // 256)
            subnet = IPv4Network((start, 24))
            if not command("ip", "route", "show", "root", str(subnet)):
                command("ip", "address", "add", f"{subnet[1]}/24", "dev", self._bridge)
                command("ip", "link", "set", self._bridge, "up")
                return subnet
        raise RuntimeError(f"expected a free subnet of {SUBNETS}, found {NETWORK_TRIES} in use")

    def make(
        self, name: str, address: str, words: Sequence[str], printed: Path, options: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        """Start the machine's first process, which ends with its exit code; one of that name has
        ended. Nothing but its volumes can be written.

        printed: file of this machine, to which what it prints is added. options: for docker.
        """
        self._made[name] = address, words, printed, options
        names = "".join(f"{made[0]} {each}\n" for each, made in self._made.items())
        self._hosts.write_text(f"127.0.0.1 localhost\n{names}")
        docker("rm", "--force", "--volumes", self.container(name), check=False)
        ours = [
            *("--name", self.container(name), "--hostname", name, "--network", "none", "--read-only"),
            *("--user", str(UNPRIVILEGED), "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--volume", f"{self._hosts}:/etc/hosts:ro"),
            *(word for path in mounts() for word in ("--volume", f"{path}:{path}:ro")),
        ]
        # Once the machine has its address.
        waits = f'until grep -qF {address} /proc/net/fib_trie; do sleep 0.02; done; exec "$@"'
        whole = ["docker", "run", *ours, *options, NODE, "sh", "-c", waits, "sh", *words]
        with printed.open("ab") as out:
            process = subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        while not self._pid(name):
            if process.poll() is not None:
                raise RuntimeError(f"{name} has ended: {printed.read_text()}")
            time.sleep(0.02)
        self.plug(name)
        return process

    def revive(self, name: str) -> None:
        """The same machine, with its address and disk."""
        self.make(name, *self._made[name])

    def pid(self, name: str) -> int:
        """Of the first process, on this machine."""
        if not (pid := self._pid(name)):
            raise RuntimeError(f"expected {name} to run, but it has ended")
        return pid

    def _pid(self, name: str) -> int:
        inspect = ("inspect", "--format", "{{.State.Pid}}", self.container(name))
        return int(docker(*inspect, check=False) or 0)

    def terminate(self, *names: str) -> None:
        """SIGTERM to the first processes."""
        docker("kill", "--signal", "TERM", *map(self.container, names))

    def kill(self, *names: str) -> None:
        """Cut their power; they have ended when this returns."""
        docker("kill", *map(self.container, names))

    def execute(self, name: str, *words: str) -> None:
        docker("exec", "--workdir", str(ROOT), self.container(name), *words)

    def container(self, name: str) -> str:
        return f"elastic-{self.name}-{name}"

    def close(self) -> None:
        sweep(self.name)

    def inside(self, name: str, namespace: str, *words: str) -> None:
        """Run a command as root in a namespace of a machine: `net` or `pid`."""
        command("nsenter", "--target", str(self.pid(name)), f"--{namespace}", *words)

    def send(self, number: signal.Signals, *names: str) -> None:
        """To all processes of these machines, also to one that is being forked."""
        for name in names:
            # Within its namespace -1 means all processes but the first one and the sender.
            self.inside(name, "pid", "sh", "-c", f"kill -{int(number)} -1")
            os.kill(self.pid(name), number)

    def unplug(self, name: str) -> None:
        """Remove the network interface, and with it all connections."""
        self.inside(name, "net", "ip", "link", "delete", "eth0")

    def plug(self, name: str) -> None:
        here, address = f"{self._bridge}.{next(self._cables)}", self._made[name][0]
        # The hardware's address stays, as others keep it in mind for a minute.
        hardware = ":".join(["02", "42", *(f"{byte:02x}" for byte in IPv4Address(address).packed)])
        peer = ("peer", "name", "eth0", "address", hardware, "netns", str(self.pid(name)))
        command("ip", "link", "add", here, "type", "veth", *peer)
        command("ip", "link", "set", here, "master", self._bridge, "up")
        self.inside(name, "net", "ip", "link", "set", "lo", "up")
        self.inside(name, "net", "ip", "address", "add", f"{address}/24", "dev", "eth0")
        self.inside(name, "net", "ip", "link", "set", "eth0", "up")


def command(*words: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
    """Raises RuntimeError if it fails and `check`, and if there is no such command."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env=os.environ | dict(env or {})
        )
    except OSError as error:
        raise RuntimeError(f"{words[0]}: {error}") from error
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr.strip()}")
    return done.stdout.strip()


def mounts() -> list[Path]:
    """Folders that a node needs: virtual environment, its base interpreter, and sources."""
    base = Path(sys.base_prefix).resolve()
    # The base image has the distribution's interpreter too, and nothing may be mounted over /usr.
    ours = [] if base == Path("/usr") else [base]
    # The scripts in a virtual environment name its path at installation, which may be a symbolic
    # link.
    return list(dict.fromkeys([*ours, Path(sys.prefix).resolve(), Path(sys.prefix), ROOT]))


def docker(*words: str, check: bool = True) -> str:
    """The classic builder needs no plugin, and our Dockerfiles need no other."""
    return command("docker", *words, check=check, env={"DOCKER_BUILDKIT": "0"})


def engine() -> str:
    """The version of the engine that answers, which is started where there is none."""
    need("docker", "docker.io")
    version = partial(docker, "version", "--format", "{{.Server.Version}}", check=False)
    if found := version():
        return found
    need("dockerd", "docker.io")
    need("iptables", "iptables")
    log = Path(tempfile.gettempdir()) / "dockerd.log"
    with log.open("wb") as out:
        daemon = subprocess.Popen(["dockerd"], stdout=out, stderr=out, start_new_session=True)
    try:
        return wait_for(
            version, "an answer of dockerd", lambda: daemon.poll() is not None, within_s=START_S, poll_s=0.2
        )
    except TimeoutError as error:
        printed = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise NotAvailable(f"{error}: {printed}") from error


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
