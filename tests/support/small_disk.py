"""A file system of limited size, in mount namespaces that need no root."""

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest


class SmallDisk:
    """A process of its own keeps the namespaces; `env` makes an agent enter them. `seen` is the
    folder as the agents see it, for other processes. Containers may forbid even that.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        own_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._flags = ["--mount", *(["--user", "--preserve-credentials"] if own_user else [])]
        words = ["unshare", "--mount", *own_user, "sh", "-c", "echo; exec sleep infinity"]
        self._keeper = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        assert self._keeper.stdout is not None
        self.seen = Path(f"/proc/{self._keeper.pid}/root{folder}")
        self._filler = self.seen / "filler"
        if not self._keeper.stdout.readline():
            self.close()
            pytest.skip("NOT TESTED: a full disk needs a mount namespace, which this container forbids")

    @property
    def env(self) -> dict[str, str]:
        return {"DRILL_NAMESPACES": str(self._keeper.pid)}

    def mount(self, options: str) -> None:
        words = ["nsenter", "--target", str(self._keeper.pid), *self._flags, "mount", "-t", "tmpfs"]
        subprocess.run([*words, "-o", options, "tmpfs", str(self._folder)], check=True)

    def fill(self) -> None:
        """To the last byte: a tmpfs counts whole pages."""
        with self._filler.open("ab", buffering=0) as file:
            for piece in (b"x" * 4096, b"x"):
                with suppress(OSError):
                    while file.write(piece) == len(piece):
                        pass

    def free(self) -> None:
        self._filler.unlink()

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()
