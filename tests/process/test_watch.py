"""A run that trains is shown by `elastic-train watch` in a real terminal, and by `--http`."""

import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import closing, suppress
from urllib.request import urlopen

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


def test_watch_and_metrics_follow_the_run_that_trains(drill):
    """`watch` in a terminal, and `--http`, whose pages count a recovery."""
    drill.shut(8, 12)
    agent = drill.start("--snapshot-every", "1", "--http", "127.0.0.1:0")
    pattern = re.compile(r"metrics of this agent: http://(\S+)/metrics")
    where = drill.waits_for(lambda: pattern.search(agent.output), "the address of --http")[1]

    def page(name):
        with urlopen(f"http://{where}/{name}", timeout=30) as answer:
            return answer.read().decode()

    page("healthz")
    drill.stands(8, ranks=1)
    drill.kill_worker(0, generation=1)
    drill.happens("restored", generation=2)
    drill.open(8)
    drill.stands(12, ranks=1)
    counted = re.compile(r'^elastic_recoveries_total\{.*cause="failure".*\} 1\.0$', re.MULTILINE)
    drill.waits_for(lambda: counted.search(page("metrics")), "the recovery")
    assert page("readyz") == "ok: generation 2\n"
    with closing(Terminal("watch", str(drill.run.local))) as watched:
        drill.waits_for(lambda: "11 of 24" in watched.text, "the newest step")
        assert "running" in watched.text
        drill.open(12)
        agent.ends_with(0)
        assert watched.ends() == 0
        assert "finished after step 24" in watched.text
        assert "24 of 24" in watched.text
