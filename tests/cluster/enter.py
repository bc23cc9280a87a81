"""A command becomes a process of a container, from a fork that has imported torch already: a node begins in a tenth of a second instead of in four.

What runs this is forked from a warm process of this machine. It stays outside, tells the number of the process that it forked into the container, and ends as that one ends. That one is
in every namespace and control group of the container, without capabilities and under its user: what is done to the container is done to it. The engine's seccomp filter alone is
missing. It needs root. With ENTER_COLD the command is begun anew in there, imports and all, under what the environment then says (LD_PRELOAD).
"""

import ctypes
import os
import sys
from pathlib import Path

# What a worker of the recipe will need, so that no node imports it.
import torch._dynamo
import torch.optim.swa_utils  # noqa: F401
import torchvision  # noqa: F401

from elastic import cli

CGROUPS = Path("/sys/fs/cgroup")
NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET, NEWNS = (
    0x02000000, 0x04000000, 0x08000000, 0x20000000, 0x40000000, 0x00020000,
)  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
LAST_CAPABILITY = Path("/proc/sys/kernel/cap_last_cap")
SIGKILL = 9
EXIT_SIGNALLED = 128  # plus the signal's number, as a container's exit code


def main() -> None:
    words = sys.argv[1:]
    container = int(os.environ.pop("ENTER_CONTAINER"))
    told, user = Path(os.environ.pop("ENTER_TELL")), int(os.environ.pop("ENTER_USER"))
    folder, is_cold = os.environ.pop("ENTER_FOLDER"), bool(os.environ.pop("ENTER_COLD", ""))
    libc = ctypes.CDLL(None, use_errno=True)
    target = os.pidfd_open(container)
    groups = [os.open(path, os.O_WRONLY) for path in cgroups(container)]
    capabilities = int(LAST_CAPABILITY.read_text()) + 1
    _check(libc.setns(target, NEWPID))  # takes effect for children alone
    child = os.fork()
    if child:
        part = told.with_suffix(".part")
        part.write_text(str(child))
        part.replace(told)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else EXIT_SIGNALLED - code)
    os.setsid()
    for group in groups:
        os.write(group, b"0")
        os.close(group)
    _check(libc.setns(target, NEWNS | NEWUTS | NEWIPC | NEWNET | NEWCGROUP))
    os.close(target)
    for number in range(capabilities):
        _check(libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0))
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # A change of user undoes these: as a process that began under its user, it dies with its parent and its own may look into its /proc.
    _check(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))
    _check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
    os.chdir(folder)
    if is_cold:
        os.execve(sys.executable, [sys.executable, "-m", "elastic.cli", *words], dict(os.environ))
    cli.command()


def cgroups(pid: int) -> list[Path]:
    """The files by which a process enters the control groups that `pid` is in, of either version of them."""
    found = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", maxsplit=2)
        name = controllers.removeprefix("name=")
        roots = [CGROUPS / name] if name else [CGROUPS, CGROUPS / "unified"]
        files = [root / path.lstrip("/") / "cgroup.procs" for root in roots]
        found += [file for file in files if path != "/" and file.exists()]
    return found


def _check(answer: int) -> None:
    if answer:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
