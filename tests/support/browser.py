"""A page in a real browser: Chromium without a window, driven by its DevTools protocol over pipes.

Every call has a limit. What the page says on its console, and every request that it makes, is kept
for the test to judge.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apt

# A page that `serve` draws on a busy machine may be a minute old (report/views.py).
LIMIT_S = 120.0
_WAIT_MS = 100_000
# The protocol's own numbers: the browser reads commands from 3, and writes answers to 4. The pipes
# are moved out of the way first.
_EXEC = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)


class Browser:
    def __init__(self, commands: int, answers: int) -> None:
        """File descriptors of the two pipes."""
        self._commands, self._answers = commands, answers
        self._read = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        deadline = time.monotonic() + LIMIT_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def _next(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._read:
            left_s = deadline - time.monotonic()
            ready = left_s > 0 and select.select([self._answers], [], [], left_s)[0]
            assert ready, f"the browser did not answer {method} within {LIMIT_S:.0f} s"
            data = os.read(self._answers, 1 << 20)
            assert data, f"the browser ended during {method}"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, url: str, *, size: tuple[int, int] = (1280, 900), dark: bool = False) -> "Page":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.resize(size)
        page.set_dark(dark)
        page.call("Page.navigate", url=url)
        page.wait("document.readyState === 'complete'")
        return page


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of what its promise brings."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, f"{expression}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The first true value, which is looked for at each frame that the page draws."""
        tried = (
            "(async () => { const begin = performance.now();"
            f" for (let value; performance.now() - begin < {_WAIT_MS}; ) {{ value = ({expression});"
            " if (value) return value; await new Promise((done) => requestAnimationFrame(done)); }"
            " return null; })()"
        )
        value = self.evaluate(tried)
        assert value, f"waited in vain for {expression}"
        return value

    def resize(self, size: tuple[int, int]) -> None:
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def set_dark(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """kind: mouseMoved, mousePressed or mouseReleased."""
        # While a button is held, a move says so.
        self.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button="left" if clicks else "none",
            buttons=1 if clicks and kind != "mouseReleased" else 0,
            clickCount=clicks,
        )

    def drag(self, x: float, to: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, 1)
        self.mouse("mouseMoved", (x + to) / 2, y, 1)
        self.mouse("mouseMoved", to, y, 1)
        self.mouse("mouseReleased", to, y, 1)

    def complaints(self) -> list[Any]:
        """What the console of the page has of errors and warnings."""
        self.evaluate("0")  # what came before this answer has been read
        return [
            each["params"]
            for each in self._own()
            if each["method"] == "Runtime.exceptionThrown"
            or (each["method"] == "Log.entryAdded" and each["params"]["entry"]["level"] != "verbose")
            or (
                each["method"] == "Runtime.consoleAPICalled"
                and each["params"]["type"] in {"error", "warning", "assert"}
            )
        ]

    def requests(self) -> list[str]:
        """The URLs that it asked for, with that of the page itself."""
        self.evaluate("0")
        return [
            each["params"]["request"]["url"]
            for each in self._own()
            if each["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        self.call("Page.close")

    def _own(self) -> list[dict[str, Any]]:
        return [each for each in self._browser.events if each.get("sessionId") == self._session]


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """folder: for its profile. Installs the browser where there is none; raises CannotInstall."""
    apt.need("chromium", "chromium", otherwise="install Chromium, and let `chromium` start it")
    commands_read, commands = os.pipe()
    answers, answers_write = os.pipe()
    root = ("--no-sandbox",) if os.geteuid() == 0 else ()
    words = ["chromium", *_FLAGS, *root, f"--user-data-dir={folder}", "about:blank"]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _EXEC, str(commands_read), str(answers_write), *words],
            pass_fds=(commands_read, answers_write),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(commands_read)
    os.close(answers_write)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        # Its processes are a group of their own.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
