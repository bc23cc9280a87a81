"""The compose files themselves, with a node killed while one watches: the run ends with the digest of one that nobody disturbed.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine import NoEngine, docker, need_package
from etcd_servers import etcd_program
from evidence import evidence
from image import BASE, NODE, ROOT, mounts
from oracle import Evidence, Struck
from run_storage import reached
from scenario_runner import WentWrong

from elastic.config.run_dir import RunDir
from elastic.report.download import readable

RECIPE = "recipes/barlow.py"
# Long enough that three nodes are together for most of it, on a machine of two cores.
ARGUMENTS = ("--epochs", "24")
NODES = 3
PATIENCE_S = 600.0  # three nodes import everything side by side here
LOOK_S = 2.0  # each look starts an interpreter
MAIN = "docker-compose.yml"
STORE_PORT = 9000
ETCD_BASE = "elastic-train-etcd-base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """`services` that are nodes, with how many of each; `servers`: others of the node's image."""

    title: str
    file: str = MAIN
    services: tuple[tuple[str, int], ...] = (("node", NODES),)
    servers: tuple[str, ...] = ()
    run: str = "/runs/barlow"
    within_s: float = 15.0
    needs_etcd: bool = False

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys([MAIN, self.file]))


PROFILES = {
    "compose": Profile(
        title="docker-compose.yml: three nodes train recipes/barlow.py, one is killed while they do."
    ),
    "compose_etcd": Profile(
        title="docker-compose.etcd.yml: the same, and they meet in etcd.",
        file="docker-compose.etcd.yml",
        needs_etcd=True,
    ),
    "compose_s3": Profile(
        title="docker-compose.s3.yml: the same, and they share nothing but an object store.",
        file="docker-compose.s3.yml",
        servers=("s3",),
        run="s3://runs/barlow",
        within_s=60.0,
    ),
    "compose_c10d": Profile(
        title="docker-compose.c10d.yml: the same, and they meet in a store on one of them, which is not the one that is killed.",
        file="docker-compose.c10d.yml",
        services=(("node", NODES - 1), ("host", 1)),
    ),
}


class Compose:
    """One project of a profile; use as a context manager."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._words = compose_command()
        self._folder = Path(tempfile.mkdtemp(prefix="elastic-compose-"))
        self._project = f"elastic{secrets.token_hex(4)}"
        self._override = self._folder / "override.json"
        volumes = [f"{folder}:{folder}:ro" for folder in mounts()]
        path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        ours = {
            "volumes": volumes,
            "environment": {"PYTHONPATH": str(ROOT), "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        }
        names = [*profile.servers, *(name for name, _ in profile.services)]
        self._override.write_text(json.dumps({"services": dict.fromkeys(names, ours)}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._compose("down", "--volumes", "--timeout", "0", check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def perform(self) -> Evidence:
        """Three nodes train, one is killed, the others finish. Raises WentWrong."""
        if self._profile.needs_etcd:
            _make_etcd_base(self._folder)
        self._compose("up", "--detach", "--build", "--scale", f"node={dict(self._profile.services)['node']}")
        nodes = [
            node
            for name, _ in self._profile.services
            for node in self._compose("ps", "--quiet", name).split()
        ]
        self._waits_for(lambda: self._status(nodes).get("world_size") == NODES, f"{NODES} workers")
        status = self._status(nodes)
        struck = Struck(time=time.time(), step=int(status["step"]), generation=int(status["generation"]))
        docker("kill", nodes[0])
        codes = docker("wait", *nodes, timeout_s=PATIENCE_S).split()
        if sorted(codes) != ["0", "0", "137"]:
            raise WentWrong(
                f"expected the exit codes 0, 0 and 137, found {codes}: {self._compose('logs', '--tail', '5')}"
            )
        with self._readable(nodes[1]) as run:
            return evidence(run, struck=[struck])

    @contextmanager
    def _readable(self, node: str) -> Iterator[RunDir]:
        """The run as a folder: from the object store, or a copy of what `node` sees."""
        if not self._profile.servers:
            docker("cp", f"{node}:{self._profile.run}", str(self._folder / "run"))
            yield RunDir.parse(str(self._folder / "run"))
            return
        server = self._compose("ps", "--quiet", *self._profile.servers)
        address = docker(
            "inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", server
        )
        with (
            reached(f"http://{address}:{STORE_PORT}"),
            readable(RunDir.parse(self._profile.run)) as run,
        ):
            yield run

    def _status(self, nodes: list[str]) -> dict[str, Any]:
        """Of a node that can be asked; empty while there is no run yet."""
        for node in nodes:
            told = docker("exec", node, "elastic-train", "status", self._profile.run, "--json", check=False)
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
        files = [*(str(ROOT / name) for name in self._profile.files), str(self._override)]
        asked = [word for file in files for word in ("--file", file)]
        done = subprocess.run(
            [*self._words, *asked, "--project-name", self._project, *words],
            capture_output=True,
            text=True,
            check=False,
            process_group=0,
            env=os.environ
            | {"BASE": ETCD_BASE if self._profile.needs_etcd else BASE}
            | {"TARGET": "node", "IMAGE": NODE, "DOCKER_BUILDKIT": "0"}
            | {"RECIPE": " ".join([str(ROOT / RECIPE), "--", *ARGUMENTS])},
        )
        if check and done.returncode:
            raise WentWrong(f"compose {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()


def _make_etcd_base(folder: Path) -> None:
    """The base with this machine's etcd in it, so that the image of etcd needs no package."""
    context = folder / "etcd"
    context.mkdir()
    shutil.copy(etcd_program(), context / "etcd")
    (context / "Dockerfile").write_text(f"FROM {BASE}\nCOPY etcd /usr/local/bin/etcd\n")
    docker("build", "--tag", ETCD_BASE, str(context))


def compose_command() -> list[str]:
    """`docker compose` where that plugin is, else docker-compose. Raises NoEngine."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    try:
        need_package("docker-compose", "docker-compose")
    except NoEngine as error:
        raise WentWrong(str(error)) from error
    return ["docker-compose"]
