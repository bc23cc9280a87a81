"""A program that tests need is there, or apt-get installs it, or a sentence says why it cannot."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_QUIET = {"DEBIAN_FRONTEND": "noninteractive"}
_LIMIT_S = 600.0


class CannotInstall(Exception):  # noqa: N818 - a state of this machine
    """The message says what is missing, and what to do."""


def need(command: str, package: str, *, otherwise: str) -> None:
    """Install `package` if `command` is missing. Raises CannotInstall.

    otherwise: what to do where there is no apt-get.
    """
    if shutil.which(command) is not None:
        return
    if shutil.which("apt-get") is None:
        raise CannotInstall(
            f"expected {command} or apt-get to install {package} with, found neither; {otherwise}"
        )
    with (Path(tempfile.gettempdir()) / "elastic-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run beside each other, and apt-get refuses that
        if shutil.which(command) is None:
            _install(package)
    if shutil.which(command) is None:
        raise CannotInstall(f"expected {command} in the package {package}, found none")


def _install(package: str) -> None:
    print(f"installing {package}", flush=True)
    for words in (["update"], ["install", "--yes", "--no-install-recommends", package]):
        done = subprocess.run(
            ["apt-get", "--quiet", *words],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | _QUIET,
            timeout=_LIMIT_S,
        )
        if done.returncode:
            raise CannotInstall(
                f"expected apt-get {' '.join(words)} to succeed, found: {_end(done.stderr or done.stdout)}"
            )


def _end(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-3:]) or "nothing printed"
