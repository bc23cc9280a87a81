"""A program that tests need is there, or apt-get fetches it, or a sentence says why it cannot."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_QUIET = {"DEBIAN_FRONTEND": "noninteractive"}
_LIMIT_S = 600.0


class NotAvailable(Exception):  # noqa: N818 - a state of this machine; the caller decides
    """What a test needs is not here; the message says what, and what to do."""


def need(command: str, package: str) -> None:
    """Install `package` if `command` is missing. Raises NotAvailable."""
    if shutil.which(command) is not None:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise NotAvailable(
            f"expected the command {command}, found none, nor apt-get to be run as root; install {package}"
        )
    with _alone():
        if shutil.which(command) is None:
            print(f"installing {package}", flush=True)
            run("apt-get", "--quiet", "update")
            run("apt-get", "--quiet", "install", "--yes", "--no-install-recommends", package)
    if shutil.which(command) is None:
        raise NotAvailable(f"expected {command} in the package {package}, found none")


def unpack(folder: Path, *packages: str) -> Path:
    """The folder `usr` of packages that are unpacked in this folder, and not installed: an
    installed one may be started as a service. Raises NotAvailable.
    """
    download = ("apt-get", "download", *packages)
    try:
        run(*download, folder=folder)
    except NotAvailable:
        if os.geteuid() != 0:
            raise
        with _alone():
            run("apt-get", "update")  # the list of packages may be missing, as in CI
        run(*download, folder=folder)
    for package in sorted(folder.glob("*.deb")):
        run("dpkg", "-x", str(package), ".", folder=folder)
    return folder / "usr"


@contextmanager
def _alone() -> Iterator[None]:
    """Tests and scenarios run beside each other, and apt-get refuses that."""
    with (Path(tempfile.gettempdir()) / "elastic-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*words: str, folder: Path | None = None) -> None:
    """Raises NotAvailable where the command is missing or fails."""
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | _QUIET,
            timeout=_LIMIT_S,
        )
        said = (done.stderr or done.stdout or "nothing printed") if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        said = str(error)
    if said:
        end = " / ".join(said.strip().splitlines()[-3:])
        raise NotAvailable(f"expected {' '.join(words)} to succeed on this machine, found: {end}")
