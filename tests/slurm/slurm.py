"""A whole Slurm on this machine, of one controller and a daemon for each pretended node, in a
folder of its own, without root, munge or containers.

Its programs are those of Debian's packages, unpacked; nothing is installed. Each command is a
script that finds its libraries and the configuration by itself, so a job has the environment that
it would have anywhere.

What a job runs is not known here. Daemons and jobs end with the run of the harness, however that
ends (supervised.py).
"""

import getpass
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import apt
from gates import wait_for

TEMPLATE = Path(__file__).with_name("slurm.conf")
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("libmunge2", "libhwloc15", "libnuma1"),
)
NODES = 8
START_S, COMMAND_S, POLL_S = 60.0, 60.0, 0.25


class Slurm:
    """The commands of a Slurm that runs."""

    def __init__(self, folder: Path, commands: Path) -> None:
        """folder: of the daemons. commands: the folder with the scripts."""
        self.folder, self.commands = folder, commands

    def call(self, *words: str, **variables: str) -> str:
        """What the command prints. Raises RuntimeError, with what it said, where it fails.

        variables: in addition to those of this process; a job gets all of them.
        """
        path = os.pathsep.join([str(self.commands), str(Path(sys.executable).parent), os.environ["PATH"]])
        found = subprocess.run(
            words,
            env=os.environ | {"PATH": path} | variables,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if found.returncode:
            raise RuntimeError(f"{' '.join(words)}: {found.stderr.strip()}")
        return found.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Reason, Restarts, NodeList and others."""
        text = self.call("scontrol", "--oneliner", "show", "job", job)
        found = dict(word.partition("=")[::2] for word in text.split() if "=" in word)
        if "JobState" not in found:
            raise RuntimeError(f"expected Slurm to know job {job}, found {text!r}")
        return found

    def begin_now(self, job: str) -> None:
        """End the two minutes that Slurm has a requeued job wait.

        Not in the second in which it ended: the daemons refuse what was allowed before its end.
        """
        self.call("scontrol", "update", f"jobid={job}", "starttime=now+2")

    def end_soon(self, job: str) -> None:
        """Have the time limit of a running job end in 45 to 105 seconds. Limits are minutes."""
        hours, minutes, seconds = map(int, self.state(job)["RunTime"].split(":"))
        limit = hours * 60 + minutes + (1 if seconds < 15 else 2)
        self.call("scontrol", "update", f"jobid={job}", f"timelimit={limit}")

    def unlimit(self, job: str) -> None:
        self.call("scontrol", "update", f"jobid={job}", "timelimit=60")


def slurm(folder: Path) -> Slurm:
    """A running Slurm in this folder, with all nodes idle. Raises NotAvailable."""
    (folder / "packages").mkdir(parents=True)
    usr = apt.unpack(folder / "packages", *PACKAGES)
    configuration = folder / "slurm.conf"
    configuration.write_text(_configuration(usr, folder))
    (folder / "state").mkdir()
    found = Slurm(folder, folder / "bin")
    _write_commands(usr, found.commands, configuration)
    nodes, steps = [f"n{n}" for n in range(1, NODES + 1)], str(usr / "sbin" / "slurmstepd-wlm")
    daemons = [_start(found, "slurmctld", "-D")]
    daemons += [_start(found, "slurmd", "-D", "-N", node, "-d", steps) for node in nodes]

    def are_idle() -> bool:
        if any(daemon.poll() is not None for daemon in daemons):
            raise TimeoutError("expected Slurm's daemons to run, found that one ended")
        with suppress(RuntimeError):  # the controller does not answer yet
            states = set(found.call("sinfo", "--noheader", "-N", "--format=%N %T").splitlines())
            return states == {f"{node} idle" for node in nodes}
        return False

    try:
        wait_for(are_idle, "Slurm's nodes to be idle", within_s=START_S, poll_s=POLL_S)
    except TimeoutError as error:
        logs = [line for path in sorted(folder.glob("*.log")) for line in path.read_text().splitlines()[-3:]]
        raise apt.NotAvailable("\n".join([f"{error}:", *logs])) from error
    return found


def _write_commands(usr: Path, folder: Path, configuration: Path) -> None:
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


def _configuration(usr: Path, folder: Path) -> str:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(NODES + 1)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        controller, *nodes = (str(each.getsockname()[1]) for each in sockets)
    values = {
        "HOST": socket.gethostname(),
        "USER": getpass.getuser(),
        "FOLDER": str(folder),
        "PLUGINS": str(next((usr / "lib").rglob("auth_none.so")).parent),
        "CONTROLLER_PORT": controller,
        "NODE_PORTS": ",".join(nodes),
    }
    text = TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _start(found: Slurm, name: str, *words: str) -> subprocess.Popen[bytes]:
    with (found.folder / f"{name}{''.join(words[2:3])}.log").open("ab") as log:
        return subprocess.Popen(
            [str(found.commands / name), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
