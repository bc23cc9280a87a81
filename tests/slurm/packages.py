"""Slurm's programs and plugins lie in a folder of their own; nothing is installed on the machine.

They are Debian's packages, unpacked. Each command is a script that finds its libraries and the
configuration by itself, so a job has the environment that it would have anywhere.
"""

from pathlib import Path

import apt

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


def write_commands(usr: Path, folder: Path, configuration: Path) -> None:
    """Put a script for each command into this folder. Raises NotAvailable where none can run."""
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
    apt.run(str(folder / "slurmctld"), "-V")


def plugins(usr: Path) -> Path:
    return next((usr / "lib").rglob("auth_none.so")).parent
