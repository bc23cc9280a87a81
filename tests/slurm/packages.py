"""Slurm's programs and plugins lie in a folder of their own; nothing is installed on the machine.

They are Debian's packages, unpacked. Each command is a script that finds its libraries and the
configuration by itself, so a job has the environment that it would have anywhere.
"""

import subprocess
from pathlib import Path

PACKAGES = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "libmunge2",
    "libhwloc15",
    "libnuma1",
)
COMMANDS = {
    "sbatch": "bin/sbatch",
    "srun": "bin/srun",
    "scancel": "bin/scancel",
    "scontrol": "bin/scontrol",
    "sinfo": "bin/sinfo",
    "squeue": "bin/squeue",
    "slurmctld": "sbin/slurmctld-wlm",
    "slurmd": "sbin/slurmd-wlm",
    "slurmstepd": "sbin/slurmstepd-wlm",
}
DOWNLOAD_S = 60.0


class NoSlurm(Exception):  # noqa: N818 - a state of this machine; the caller decides
    """Slurm cannot be had, or does not start, on this machine; the message says why."""


def unpack(folder: Path) -> Path:
    """The folder `usr` with Slurm's files, below this one. Raises NoSlurm."""
    folder.mkdir(parents=True)
    try:
        _call("apt-get", "download", *PACKAGES, folder=folder)
        for package in sorted(folder.glob("*.deb")):
            _call("dpkg", "-x", str(package), ".", folder=folder)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise NoSlurm(
            f"expected `apt-get download` to fetch {', '.join(PACKAGES)}, found: {said[-1] if said else error};"
            " run this on Debian, after `apt-get update`, where its packages can be reached"
        ) from error
    return folder / "usr"


def write_commands(usr: Path, folder: Path, configuration: Path) -> None:
    """Put a script for each command into this folder. Raises NoSlurm where none can run."""
    folder.mkdir()
    libraries = sorted({str(path.parent) for path in (usr / "lib").rglob("*.so*")})
    for name, place in COMMANDS.items():
        words = [
            "#!/bin/sh",
            f"export SLURM_CONF='{configuration}' LD_LIBRARY_PATH='{':'.join(libraries)}'",
            f"exec '{usr / place}' \"$@\"",
        ]
        (folder / name).write_text("\n".join(words) + "\n")
        (folder / name).chmod(0o755)
    try:
        _call(str(folder / "slurmctld"), "-V", folder=folder)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise NoSlurm(
            f"expected Debian's Slurm to run, found: {said}; install the library that it lacks"
        ) from error


def plugins(usr: Path) -> Path:
    return next((usr / "lib").rglob("auth_none.so")).parent


def _call(*words: str, folder: Path) -> None:
    subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
