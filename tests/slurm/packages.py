"""Slurm's programs and plugins lie in a folder of their own; nothing is installed on the machine.

They are Debian's packages, unpacked. Each command is a script that finds its libraries and the
configuration by itself, so a job has the environment that it would have anywhere.
"""

from pathlib import Path

import apt

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("libmunge2", "libhwloc15", "libnuma1"),
)


def write_commands(usr: Path, folder: Path, configuration: Path) -> None:
    """Put a script for each command into this folder. Raises NotAvailable where none can run."""
    folder.mkdir()
    libraries = sorted({str(path.parent) for path in (usr / "lib").rglob("*.so*")})
    for program in (*usr.glob("bin/*"), *usr.glob("sbin/*")):
        words = [
            "#!/bin/sh",
            f"export SLURM_CONF='{configuration}' LD_LIBRARY_PATH='{':'.join(libraries)}'",
            f"exec '{program}' \"$@\"",
        ]
        command = folder / program.name.removesuffix("-wlm")  # of the distribution's workload manager
        command.write_text("\n".join(words) + "\n")
        command.chmod(0o755)
    apt.run(str(folder / "slurmctld"), "-V")


def plugins(usr: Path) -> Path:
    return next((usr / "lib").rglob("auth_none.so")).parent
