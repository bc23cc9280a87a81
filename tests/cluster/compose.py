"""A run of each compose file ends with the undisturbed digest although one of its nodes is killed.

An override file replaces image, interpreter and sources by those of the other scenarios, and
nothing else. So the images that a registry would serve are not tested here.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apt import need
from etcd_servers import etcd_program
from gates import wait_for
from machines import BASE, NODE, ROOT, command, docker, mounts
from oracle import Evidence, Injection, evidence
from run_storage import reached
from scenario_runner import ScenarioFailed
from supervised import sweep

from elastic.config.run_dir import RunDir
from elastic.report.views import readable

RECIPE = ROOT / "recipes" / "barlow.py"
# Long enough that all three nodes train for most of the run, on a machine with two cores.
ARGUMENTS = ("--epochs", "24")
NODES = 3
LIMIT_S = 600.0  # three nodes import torch at the same time on this machine
POLL_S = 2.0  # each poll starts an interpreter
STORE_PORT = 9000
ETCD_BASE = "elastic-train-etcd-base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """services: those that are nodes, the first of which has the first node. within: seconds from a
    node's death to the end of a new step.
    """

    name: str
    services: tuple[str, ...] = ("node",)
    run: str = "/runs/barlow"
    within: int = 15

    @property
    def file(self) -> str:
        return f"docker-{self.name.replace('_', '.')}.yml"


PROFILES = (
    Profile(name="compose"),
    Profile(name="compose_etcd"),
    Profile(name="compose_s3", run="s3://runs/barlow", within=60),
    # One node holds the rendezvous store, another one is killed.
    Profile(name="compose_c10d", services=("node", "host")),
)


def play(profile: Profile, run: str) -> Evidence:
    """Train on three nodes, kill one, and let the others finish. Raises ScenarioFailed.

    run: the name that all its containers begin with.
    """
    folder = Path(tempfile.mkdtemp(prefix="elastic-compose-"))
    try:
        if "etcd" in profile.name:
            _make_etcd_base(folder)
        return _play(profile, _Project(profile, folder, f"elastic-{run}"), folder)
    finally:
        sweep(run)


class _Project:
    def __init__(self, profile: Profile, folder: Path, name: str) -> None:
        path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        ours = {
            "volumes": [f"{folder}:{folder}:ro" for folder in mounts()],
            "environment": {"PYTHONPATH": str(ROOT), "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        }
        services = [*profile.services, *(["s3"] if "s3" in profile.name else [])]
        override = folder / "override.json"
        override.write_text(json.dumps({"services": dict.fromkeys(services, ours)}))
        files = dict.fromkeys([ROOT / "docker-compose.yml", ROOT / profile.file, override])
        self._words = [*_command(), "--project-name", name]
        self._words += [word for file in files for word in ("--file", str(file))]
        self._env = {
            "BASE": ETCD_BASE if "etcd" in profile.name else BASE,
            "TARGET": "node",
            "IMAGE": NODE,
            "RECIPE": " ".join([str(RECIPE), "--", *ARGUMENTS]),
            "DOCKER_BUILDKIT": "0",
        }

    def call(self, *words: str) -> str:
        return command(*self._words, *words, env=self._env)


def _play(profile: Profile, project: _Project, folder: Path) -> Evidence:
    scale = f"node={NODES + 1 - len(profile.services)}"
    project.call("up", "--detach", "--build", "--scale", scale)
    nodes = [node for name in profile.services for node in project.call("ps", "--quiet", name).split()]

    def whole() -> dict[str, Any]:
        """`status --json` of the first node that answers, once all nodes train."""
        for node in nodes:
            answer = docker("exec", node, "elastic-train", "status", profile.run, "--json", check=False)
            if answer.startswith("{"):
                found: dict[str, Any] = json.loads(answer)
                return found if found.get("world_size") == NODES else {}
        return {}

    status = wait_for(whole, f"{NODES} workers", within_s=LIMIT_S, poll_s=POLL_S)
    injection = Injection(time=time.time(), step=int(status["step"]), generation=int(status["generation"]))
    docker("kill", nodes[0])
    codes = docker("wait", *nodes).split()
    if sorted(codes) != ["0", "0", "137"]:
        logs = project.call("logs", "--tail", "5")
        raise ScenarioFailed(f"expected the exit codes 0, 0 and 137, found {codes}: {logs}")
    with _readable(profile, project, nodes[1], folder) as run:
        return evidence(run, injections=[injection])


@contextmanager
def _readable(profile: Profile, project: _Project, node: str, folder: Path) -> Iterator[RunDir]:
    """The run as a folder: read from the object store, or a copy of the folder that `node` sees."""
    if not profile.run.startswith("s3:"):
        docker("cp", f"{node}:{profile.run}", str(folder / "run"))
        yield RunDir.parse(str(folder / "run"))
        return
    where = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    address = docker("inspect", "--format", where, project.call("ps", "--quiet", "s3"))
    with reached(f"http://{address}:{STORE_PORT}"), readable(RunDir.parse(profile.run)) as run:
        yield run


def _make_etcd_base(folder: Path) -> None:
    """Add this machine's etcd to the base image, so that building the image of etcd downloads
    nothing.
    """
    context = folder / "etcd"
    context.mkdir()
    shutil.copy(etcd_program(), context / "etcd")
    (context / "Dockerfile").write_text(f"FROM {BASE}\nCOPY etcd /usr/local/bin/etcd\n")
    docker("build", "--tag", ETCD_BASE, str(context))


def _command() -> list[str]:
    """`docker compose` if that plugin is installed, else docker-compose. Raises NotAvailable."""
    with suppress(RuntimeError):
        docker("compose", "version")
        return ["docker", "compose"]
    need("docker-compose", "docker-compose")
    return ["docker-compose"]
