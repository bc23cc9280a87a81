"""The compose file itself, with a node killed while one watches: the run ends with the digest of one that nobody disturbed.

Image, interpreter and sources are those of the other scenarios, by an override file that says nothing else; so what a registry would serve is not tested here.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from engine import NoEngine, docker, need_package
from image import BASE, NODE, ROOT, mounts
from left import evidence
from oracle import Evidence, Struck
from play import WentWrong

from elastic.run_dir import RunDir

TITLE = "docker-compose.yml: three nodes train recipes/barlow.py, one is killed while they do."
RECIPE = "recipes/barlow.py"
WITHIN_S = 15.0
# Long enough that three nodes are together for most of it, on a machine of two cores.
ARGUMENTS = ("--epochs", "24")
NODES = 3
PATIENCE_S = 600.0  # three nodes import everything side by side here
LOOK_S = 2.0  # each look starts an interpreter
RUN = "/runs/barlow"


class Compose:
    """One project of the compose file; use as a context manager."""

    def __init__(self) -> None:
        self._words = compose_command()
        self._folder = Path(tempfile.mkdtemp(prefix="elastic-compose-"))
        self._project = f"elastic{secrets.token_hex(4)}"
        self._override = self._folder / "override.json"
        volumes = [f"{folder}:{folder}:ro" for folder in mounts()]
        path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        node = {
            "working_dir": str(ROOT),
            "volumes": volumes,
            "environment": {"PYTHONPATH": str(ROOT), "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        }
        self._override.write_text(json.dumps({"services": {"node": node}}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._compose("down", "--volumes", "--timeout", "0", check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def perform(self) -> Evidence:
        """Three nodes train, one is killed, the others finish. Raises WentWrong."""
        self._compose("up", "--detach", "--build", "--scale", f"node={NODES}")
        nodes = self._compose("ps", "--quiet").split()
        self._waits_for(lambda: self._status(nodes).get("world_size") == NODES, f"{NODES} workers")
        status = self._status(nodes)
        struck = Struck(time=time.time(), step=int(status["step"]), generation=int(status["generation"]))
        docker("kill", nodes[0])
        codes = docker("wait", *nodes, timeout_s=PATIENCE_S).split()
        if sorted(codes) != ["0", "0", "137"]:
            raise WentWrong(
                f"expected the exit codes 0, 0 and 137, found {codes}: {self._compose('logs', '--tail', '5')}"
            )
        docker("cp", f"{nodes[1]}:{RUN}", str(self._folder / "run"))
        return evidence(RunDir.parse(str(self._folder / "run")), struck=[struck])

    def _status(self, nodes: list[str]) -> dict[str, Any]:
        """Of a node that can be asked; empty while there is no run yet."""
        for node in nodes:
            told = docker("exec", node, "elastic-train", "status", RUN, "--json", check=False)
            if told.startswith("{"):
                return dict(json.loads(told))
        return {}

    def _waits_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise WentWrong(
                    f"expected {what} within {PATIENCE_S:.0f} s, found none: {self._compose('logs', '--tail', '9')}"
                )
            time.sleep(LOOK_S)

    def _compose(self, *words: str, check: bool = True) -> str:
        files = ("--file", str(ROOT / "docker-compose.yml"), "--file", str(self._override))
        done = subprocess.run(
            [*self._words, *files, "--project-name", self._project, *words],
            capture_output=True,
            text=True,
            check=False,
            process_group=0,
            env=os.environ
            | {"BASE": BASE, "TARGET": "node", "IMAGE": NODE, "DOCKER_BUILDKIT": "0"}
            | {"RECIPE": " ".join([RECIPE, "--", *ARGUMENTS])},
        )
        if check and done.returncode:
            raise WentWrong(f"compose {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()


def compose_command() -> list[str]:
    """`docker compose` where that plugin is, else docker-compose. Raises NoEngine."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    try:
        need_package("docker-compose", "docker-compose")
    except NoEngine as error:
        raise WentWrong(str(error)) from error
    return ["docker-compose"]
