"""Either a Docker engine answers on this machine, or one sentence says why none can.

If no engine runs and this process is root, an engine is installed from the distribution's packages
and started. It ends with the run (supervised.py); installed packages stay. An engine on another
machine is refused, because nodes share folders of this one.
"""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import apt
from commands import docker

START_S = 60.0


class NoEngine(Exception):  # noqa: N818 - a state of this machine; the caller decides whether it is an error
    """No container can run here; the message says why and what to do."""


def engine() -> str:
    """The version of the engine that answers, which is started where there is none."""
    host = os.environ.get("DOCKER_HOST", "")
    if host and not host.startswith("unix://"):
        raise NoEngine(
            f"expected an engine on this machine, found DOCKER_HOST={host}; its containers could not share folders of this machine. Unset it"
        )
    if version := _version():
        return version
    need_package("dockerd", "docker.io")
    need_package("iptables", "iptables")
    log = Path(tempfile.gettempdir()) / "dockerd.log"
    with log.open("wb") as out:
        daemon = subprocess.Popen(["dockerd"], stdout=out, stderr=out, start_new_session=True)
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and daemon.poll() is None:
        if version := _version():
            return version
        time.sleep(0.2)
    printed = " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
    raise NoEngine(
        f"expected dockerd to answer within {START_S:.0f} s, found: {printed or 'nothing printed'}"
    )


def need_package(program: str, package: str) -> None:
    """Install `package` if the program is missing. Raises NoEngine."""
    if shutil.which(program) is None and os.geteuid() != 0:
        raise NoEngine(f"expected the command {program}, found none; install {package}, or run this as root")
    try:
        apt.need(program, package, otherwise="install Docker by hand")
    except apt.CannotInstall as error:
        raise NoEngine(str(error)) from error


def _version() -> str:
    try:
        return docker("version", "--format", "{{.Server.Version}}", check=False)
    except RuntimeError:
        return ""
