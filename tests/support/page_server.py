"""`elastic-train serve` as a process of its own, which ends with the test."""

import http.client
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from pathlib import Path

LIMIT_S = 60.0
ANY_PORT = ("--listen", "127.0.0.1:0")
# The command, which looks at a run each second: on a busy machine it would wait for a minute.
COMMAND = "from elastic import cli; from elastic.report import views; views._LONGEST_S = 1.0; cli.command()"


class PageServer:
    """said: its first line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.printed = process.stdout
        self.said = self.printed.readline()
        self.port = int(self.said.partition("http://127.0.0.1:")[2].partition("/")[0] or 0)

    def ask(self, path: str = "/", *, method: str = "GET", **headers: str) -> tuple[int, Message, bytes]:
        """Status, headers and body of the answer; `_` stands for `-` in names of headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


@contextmanager
def served(run: str | Path, *words: str) -> Iterator[PageServer]:
    """words: the options; without any, a free port at the loopback address."""
    command = [sys.executable, "-c", COMMAND, "serve", str(run), *(words or ANY_PORT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield PageServer(process)
        finally:
            process.kill()
