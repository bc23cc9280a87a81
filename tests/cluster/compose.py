"""A run of each compose file ends with the undisturbed digest although one of its nodes is killed.

An override file replaces image, interpreter and sources by those of the other scenarios, and
nothing else. So the images that a registry would serve are not tested here.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from apt import NotAvailable, need
from containers import BASE, NODE
from etcd_servers import etcd_program
from machines import ROOT, command, docker, mounts
from oracle import Evidence, Injection, evidence
from run_storage import reached
from scenario_runner import ScenarioFailed
from supervised import sweep

from elastic.config.run_dir import RunDir
from elastic.report.download import readable

RECIPE = "recipes/barlow.py"
# Long enough that all three nodes train for most of the run, on a machine with two cores.
ARGUMENTS = ("--epochs", "24")
NODES = 3
WAIT_LIMIT_S = 600.0  # three nodes import torch at the same time on this machine
POLL_S = 2.0  # each poll starts an interpreter
MAIN = "docker-compose.yml"
STORE_PORT = 9000
ETCD_BASE = "elastic-train-etcd-base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """services: those that are nodes, with the number of each. servers: others that run the nodes'
    image.
    """

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
        title="docker-compose.yml: three nodes train recipes/barlow.py, and one of them is killed."
    ),
    "compose_etcd": Profile(
        title="docker-compose.etcd.yml: the same, with the rendezvous in etcd.",
        file="docker-compose.etcd.yml",
        needs_etcd=True,
    ),
    "compose_s3": Profile(
        title="docker-compose.s3.yml: the same; the nodes share nothing but an object store.",
        file="docker-compose.s3.yml",
        servers=("s3",),
        run="s3://runs/barlow",
        within_s=60.0,
    ),
    "compose_c10d": Profile(
        title="docker-compose.c10d.yml: the same; one node holds the rendezvous store, another one is killed.",
        file="docker-compose.c10d.yml",
        services=(("node", NODES - 1), ("host", 1)),
    ),
}


class Compose:
    """One compose project of a profile.

    Use as a context manager: it removes the project at the end.
    """

    def __init__(self, profile: Profile, run: str) -> None:
        """run: the name that its containers begin with."""
        self._profile = profile
        self._words = compose_command()
        self._folder = Path(tempfile.mkdtemp(prefix="elastic-compose-"))
        self._project = f"elastic-{run}"
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
        sweep(self._project.removeprefix("elastic-"))

    def run(self) -> Evidence:
        """Train on three nodes, kill one, and let the others finish. Raises ScenarioFailed."""
        if self._profile.needs_etcd:
            _make_etcd_base(self._folder)
        self._compose("up", "--detach", "--build", "--scale", f"node={dict(self._profile.services)['node']}")
        nodes = [
            node
            for name, _ in self._profile.services
            for node in self._compose("ps", "--quiet", name).split()
        ]
        self._wait_for(lambda: self._status(nodes).get("world_size") == NODES, f"{NODES} workers")
        status = self._status(nodes)
        injection = Injection(
            time=time.time(), step=int(status["step"]), generation=int(status["generation"])
        )
        docker("kill", nodes[0])
        codes = docker("wait", *nodes).split()
        if sorted(codes) != ["0", "0", "137"]:
            raise ScenarioFailed(
                f"expected the exit codes 0, 0 and 137, found {codes}: {self._compose('logs', '--tail', '5')}"
            )
        with self._readable(nodes[1]) as run:
            return evidence(run, injections=[injection])

    @contextmanager
    def _readable(self, node: str) -> Iterator[RunDir]:
        """The run as a folder: read from the object store, or a copy of the folder that `node`
        sees.
        """
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
        """`status --json` of the first node that answers; empty before the run exists."""
        for node in nodes:
            answer = docker("exec", node, "elastic-train", "status", self._profile.run, "--json", check=False)
            if answer.startswith("{"):
                return dict(json.loads(answer))
        return {}

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise ScenarioFailed(
                    f"expected {what} within {WAIT_LIMIT_S:.0f} s, found none: {self._compose('logs', '--tail', '9')}"
                )
            time.sleep(POLL_S)

    def _compose(self, *words: str, check: bool = True) -> str:
        files = [*(str(ROOT / name) for name in self._profile.files), str(self._override)]
        asked = [word for file in files for word in ("--file", file)]
        names = {"BASE": ETCD_BASE if self._profile.needs_etcd else BASE, "TARGET": "node", "IMAGE": NODE}
        recipe = {"RECIPE": " ".join([str(ROOT / RECIPE), "--", *ARGUMENTS]), "DOCKER_BUILDKIT": "0"}
        where = (*asked, "--project-name", self._project)
        return command(*self._words, *where, *words, check=check, env=names | recipe)


def _make_etcd_base(folder: Path) -> None:
    """Add this machine's etcd to the base image, so that building the image of etcd downloads
    nothing.
    """
    context = folder / "etcd"
    context.mkdir()
    shutil.copy(etcd_program(), context / "etcd")
    (context / "Dockerfile").write_text(f"FROM {BASE}\nCOPY etcd /usr/local/bin/etcd\n")
    docker("build", "--tag", ETCD_BASE, str(context))


def compose_command() -> list[str]:
    """`docker compose` if that plugin is installed, else docker-compose. Raises ScenarioFailed."""
    with suppress(RuntimeError):
        docker("compose", "version")
        return ["docker", "compose"]
    try:
        need("docker-compose", "docker-compose")
    except NotAvailable as error:
        raise ScenarioFailed(str(error)) from error
    return ["docker-compose"]
