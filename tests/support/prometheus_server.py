"""A real Prometheus: Debian's package, installed or unpacked, and a server on a free port."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import apt

START_S = 60.0


def unpack(folder: Path) -> Path:
    """The folder that has `prometheus` and `promtool`. Raises NotAvailable."""
    found = shutil.which("prometheus")
    return Path(found).parent if found else apt.unpack(folder, "prometheus") / "bin"


class Prometheus:
    """A server that scrapes some targets once a second."""

    def __init__(self, programs: Path, folder: Path, targets: list[str]) -> None:
        self._programs = programs
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "prometheus.yml"
        config.write_text(
            json.dumps(  # which is YAML
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                    "scrape_configs": [{"job_name": "elastic", "static_configs": [{"targets": targets}]}],
                }
            )
        )
        words = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}")
        with (folder / "printed").open("w") as printed:
            self._process = subprocess.Popen(
                [programs / "prometheus", *words, f"--web.listen-address={self._address}"],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
        self._printed = folder / "printed"
        self._wait_ready()

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The result of an instant query; raises OSError where the server refuses it."""
        url = f"http://{self._address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        result: list[dict[str, Any]] = found["data"]["result"]
        return result

    def value(self, query: str) -> float | None:
        """The one value of a query; None where there is none."""
        result = self.ask(query)
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None

    def problems(self, metrics: bytes) -> str:
        """What `promtool check metrics` says of a scrape; empty where it is clean."""
        done = subprocess.run(
            [self._programs / "promtool", "check", "metrics"], input=metrics, capture_output=True, check=False
        )
        return (done.stdout + done.stderr).decode() + (
            f"exit code {done.returncode}" if done.returncode else ""
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError), urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"Prometheus did not start:\n{self._printed.read_text()}")
            time.sleep(0.05)
