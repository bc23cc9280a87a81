"""`elastic-train watch` shows a run that trains in a real terminal, and leaves when it is over."""

import os
import pty
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


class Terminal:
    """A command in a terminal of its own. `text`: what it has printed so far."""

    def __init__(self, *words):
        self.text = ""
        self._fd, end = pty.openpty()
        env = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        command = [sys.executable, "-m", "elastic.cli", *words]
        self.process = subprocess.Popen(
            command, stdin=end, stdout=end, stderr=end, env=env, start_new_session=True
        )
        os.close(end)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with suppress(OSError):  # how the end of a terminal's last process shows
            while data := os.read(self._fd, 65536):
                self.text += data.decode(errors="replace")

    def ends(self):
        """The exit code, once everything that it printed is in `text`."""
        code = self.process.wait()
        self._reader.join()
        return code

    def close(self):
        self.process.kill()
        self.ends()
        os.close(self._fd)


def test_watch_follows_the_run_and_ctrl_c_ends_it_alone(drill):
    drill.shut(8)
    drill.start("--snapshot-every", "1")
    drill.stands(8, ranks=1)
    terminals = [Terminal("watch", str(drill.run.local)) for _ in range(2)]
    try:
        for each in terminals:
            drill.waits_for(lambda each=each: "7 of 24" in each.text, "the newest step")
        stopped, watched = terminals
        stopped.process.send_signal(signal.SIGINT)
        assert stopped.ends() == 0
        assert "Traceback" not in stopped.text
        assert "running" in watched.text
        drill.open(8)
        drill.agents[0].ends_with(0)
        assert watched.ends() == 0
        assert "finished after step 24" in watched.text
        assert "24 of 24" in watched.text
    finally:
        for each in terminals:
            each.close()
