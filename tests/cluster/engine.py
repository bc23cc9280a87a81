"""Either a Docker engine answers on this machine, or one sentence says why none can.

If no engine runs and this process is root, an engine is installed from the distribution's packages
and started. An engine that was started here is stopped here; installed packages stay. An engine on
another machine is refused, because nodes share folders of this one.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apt

PACKAGES = ("docker.io", "iptables")
START_S = 60.0
STOP_S = 30.0


class NoEngine(Exception):  # noqa: N818 - a state of this machine; the caller decides whether it is an error
    """No container can run here; the message says why and what to do."""


@contextmanager
def engine() -> Iterator[str]:
    """Yields the version of an engine that runs until the end of the block. Raises NoEngine."""
    _refuse_remote()
    if version := _version():
        yield version
        return
    if os.geteuid() != 0:
        raise NoEngine(
            "expected a Docker engine, found none that answers; start it (or run this as root, which installs and starts one)"
        )
    _need("dockerd", PACKAGES[0])
    _need("iptables", PACKAGES[1])
    with _daemon() as version:
        yield version


def docker(*words: str, check: bool = True, timeout_s: float | None = None) -> str:
    """The standard output of `docker WORDS`.

    Raises RuntimeError with its standard error if it fails and `check`.
    """
    done = subprocess.run(
        ["docker", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        process_group=0,  # Ctrl-C reaches only the tests, which then remove their containers
        # The classic builder needs no plugin, and our Dockerfiles use nothing that only BuildKit
        # has.
        env=os.environ | {"DOCKER_BUILDKIT": "0"},
    )
    if check and done.returncode:
        raise RuntimeError(f"docker {' '.join(words)}: exit code {done.returncode}\n{done.stderr.strip()}")
    return done.stdout.strip()


def need_package(command: str, package: str) -> None:
    """Install `package` if `command` is missing. Raises NoEngine."""
    if shutil.which(command) is None and os.geteuid() != 0:
        raise NoEngine(
            f"expected the command {command}, found none; install the package {package}, or run this as root"
        )
    _need(command, package)


def _refuse_remote() -> None:
    host = os.environ.get("DOCKER_HOST", "")
    if host and not host.startswith("unix://"):
        raise NoEngine(
            f"expected an engine on this machine, found DOCKER_HOST={host}; its containers could not share folders of this machine. Unset it"
        )


def _version() -> str | None:
    if shutil.which("docker") is None:
        return None
    try:
        return docker("version", "--format", "{{.Server.Version}}", timeout_s=20.0) or None
    except (RuntimeError, subprocess.TimeoutExpired):
        return None


def _need(command: str, package: str) -> None:
    try:
        apt.need(command, package, otherwise="install Docker by hand")
    except apt.CannotInstall as error:
        raise NoEngine(str(error)) from error


@contextmanager
def _daemon() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="elastic-engine-"))
    log = folder / "dockerd.log"
    with log.open("wb") as out:
        # In a session of its own: after Ctrl-C the daemon is still needed to remove the containers.
        daemon = subprocess.Popen(["dockerd"], stdout=out, stderr=out, start_new_session=True)
    try:
        yield _answer(daemon, log)
    finally:
        daemon.terminate()
        try:
            daemon.wait(STOP_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _answer(daemon: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and daemon.poll() is None:
        if version := _version():
            return version
        time.sleep(0.2)
    raise NoEngine(
        f"expected dockerd to answer within {START_S:.0f} s, found: {_end(log.read_text(errors='replace'))}"
    )


def _end(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:]) or "nothing printed"
