"""Tests start real agents and workers; the fixtures end all of them and never sleep for a fixed
time.
"""

import fcntl
import io
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, redirect_stdout, suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import pytest
import run_records
from etcd_servers import EtcdServers
from gates import Gates, wait_for

from elastic.agent.worker_process import Process, Spawner
from elastic.cli import main
from elastic.config.environment import HASH_SEED, MALLOC, pin_threads
from elastic.config.run_dir import RunDir
from elastic.report.views import readable
from elastic.system.untrusted import decode
from elastic.system.worker_protocol import StartRequest
from elastic.uploader.protocol import UploaderConfig

RECIPES = Path(__file__).parent / "recipes"
TINY = RECIPES / "tiny.py"
UPLOADER = "elastic.uploader.main"
AGENT = Path(__file__).parent / "agent.py"
OF_AGENT = ("botocore.session", "s3fs", "torch.distributed.run", "elastic.agent.launch", "elastic.cli")
OF_EXAMPLES = ("sklearn.datasets",)  # takes longer to import than torch

Record = dict[str, Any]


class Agent:
    """One process of `elastic-train`, or of another launcher.

    `output` is what it printed, both streams in one.
    """

    def __init__(
        self, words: list[str], process: Process | Popen[bytes], printed: Path, *, is_supervised: bool
    ) -> None:
        """words: its arguments. process: forked, or spawned."""
        self.words, self.process = words, process
        self._printed = printed
        self._pid = None if is_supervised else process.pid

    @property
    def pid(self) -> int:
        """Of the agent itself; `process` is its supervisor."""
        if self._pid is None:
            self._pid = wait_for(self._found, "the agent of a supervisor")
        return self._pid

    def _found(self) -> int | None:
        supervisor = self.process.pid
        forks = (pid for pid in _processes() if _parent(pid) == supervisor)
        agent = next((pid for pid in forks if _words(pid) == _words(supervisor)), None)
        return supervisor if agent is None and self.process.poll() is not None else agent

    @property
    def output(self) -> str:
        return self._printed.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """As a user gives it, to the command; what no process can handle goes to the agent."""
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
        else:
            self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code; fails the test, with what the process printed, if it does not exit."""
        try:
            wait_for(lambda: self.process.poll() is not None, f"the end of {self.words!r}")
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.output}") from error
        code = self.process.poll()
        assert code is not None
        return code

    def ends_with(self, code: int) -> None:
        assert self.wait() == code, self.output


def without_rehearsals(words: list[str]) -> list[str]:
    """Of a command that says nothing of them: each would be a generation more."""
    if "--run-dir" not in words or "--rehearse" in words:
        return words
    place = words.index("--run-dir")
    standby = os.environ.get("STANDBY") or "auto"
    return [*words[:place], "--rehearse", "off", "--standby", standby, *words[place:]]


class Drill(Gates):
    """One run directory, and everything that a test does to it."""

    def __init__(self, folder: Path, fork_server: Spawner) -> None:
        """fork_server: agents are forked from it."""
        self.folder = folder
        self.fork_server = fork_server
        self.run = RunDir.parse(str(folder / "run"))
        self.gates = folder / "gates"
        self.gates.mkdir()
        self.agents: list[Agent] = []

    # Starting.

    def start(
        self,
        *options: str,
        recipe: Path = TINY,
        arguments: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> Agent:
        """Fork an agent: `elastic-train RECIPE --run-dir RUN OPTIONS -- ARGUMENTS`.

        It saves every 4 steps unless the options set something else.
        """
        if recipe == TINY and os.environ.get("SHARDED") == "on":
            arguments = (*arguments, "--sharded")
        words = [str(recipe), "--run-dir", self.run.url, "--save-every", "4steps", *options]
        return self.command([*words, "--", *arguments] if arguments else words, env)

    def command(self, words: list[str], env: dict[str, str] | None = None) -> Agent:
        """Fork an agent with these arguments and no others."""

        def fork(words: list[str], out: int) -> Process:
            request = StartRequest(command=(str(AGENT), *words), env=self._env(env))
            return self.fork_server.start(request, out, out)

        return self._begin(words, fork, is_supervised="DRILL_SCRIPT" not in (env or {}))

    def start_two(self, *options: str, env: dict[str, str] | None = None) -> list[Agent]:
        """Two agents whose first generation has both, however late the second one comes."""
        return [self.start("--max-nodes", "2", "--last-call", "10min", *options, env=env) for _ in range(2)]

    def start_before(self, step: int | str, *options: str, ranks: int = 1, **how: Any) -> Agent:
        """Start an agent, and wait until all ranks stand before this step."""
        self.shut(step)
        agent = self.start(*options, **how)
        self.stands(step, ranks)
        return agent

    def start_script(self, script: Path, *words: str, env: dict[str, str] | None = None) -> Agent:
        """Fork `python SCRIPT WORDS`."""
        return self.command(list(words), {"DRILL_SCRIPT": str(script)} | (env or {}))

    def execute(self, words: list[str], env: dict[str, str] | None = None) -> Agent:
        def spawn(words: list[str], out: int) -> Popen[bytes]:
            streams = {"stdin": DEVNULL, "stdout": out, "stderr": out}
            return Popen(words, cwd=self.folder, env=self._env(env), **streams, start_new_session=True)

        return self._begin(words, spawn, is_supervised="elastic.cli" in words)

    def _env(self, more: dict[str, str] | None) -> dict[str, str]:
        ours = {"TINY_GATES": str(self.gates), "PYTHONUNBUFFERED": "1", "DRILL_FOLDER": str(self.folder)}
        # As the command sets them for what it starts: an agent and its fork server are forks here.
        return os.environ | ours | {"GLIBC_TUNABLES": MALLOC, HASH_SEED: "0"} | (more or {})

    def _begin(self, words: list[str], begin: Callable[..., Any], *, is_supervised: bool) -> Agent:
        printed, words = self.folder / f"printed-{len(self.agents)}", without_rehearsals(words)
        with printed.open("xb") as out:
            process = begin(words, out.fileno())
        self.agents.append(Agent(words, process, printed, is_supervised=is_supervised))
        return self.agents[-1]

    # What happened.

    def stands(self, step: int | str, ranks: int) -> None:
        """Wait until all ranks stand before this step."""
        self.waits_for(lambda: self.stand(step, ranks), f"{ranks} ranks at step {step}")

    def waits_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Fail at once when all agents have exited: the event cannot come any more."""
        try:
            return wait_for(
                condition, what, lambda: all(each.process.poll() is not None for each in self.agents)
            )
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.output}") from error

    def happens(self, name: str, **fields: Any) -> Record:
        """Wait for an event with these fields; returns the first."""
        return self.waits_for(lambda: next(iter(self.events(name, **fields)), None), f"{name} {fields}")

    def events(self, name: str, **fields: Any) -> list[Record]:
        return run_records.matching(run_records.events(self.run.events), name, **fields)

    def values(self, name: str, *fields: str, **where: Any) -> list[tuple[Any, ...]]:
        """Some fields of each of these events, by time."""
        return [tuple(event[field] for field in fields) for event in self.events(name, **where)]

    def pid_of_rank(self, rank: int, generation: int) -> int:
        return int(self.happens("worker_started", rank=rank, generation=generation)["pid"])

    def kill_worker(self, rank: int, generation: int) -> None:
        os.kill(self.pid_of_rank(rank, generation), signal.SIGKILL)

    def uploader_of(self, agent: Agent) -> int | None:
        return next((pid for pid in self.children_of(agent) if UPLOADER in _words(pid)), None)

    def fork_server_of(self, agent: Agent) -> int | None:
        """The child of the agent that is no uploader."""
        uploader = self.uploader_of(agent)
        return next((pid for pid in self.children_of(agent) if pid != uploader), None)

    def processes_of(self, agent: Agent) -> list[int]:
        """The command and everything that it started, directly or not, parents first."""
        found = [agent.process.pid]
        for pid in found:
            found += [child for child in self.alive() if _parent(child) == pid and child not in found]
        return found

    def children_of(self, agent: Agent) -> list[int]:
        return [pid for pid in self.alive() if _parent(pid) == agent.pid]

    def agent_of_rank(self, rank: int, generation: int) -> Agent:
        # A worker's parent is the agent, or its fork server.
        parent = _parent(self.pid_of_rank(rank, generation))
        return next(agent for agent in self.agents if agent.pid in (parent, _parent(parent)))

    def uploader_serves(self, agent: Agent) -> None:
        """Wait until the agent has an uploader that takes saves; a killed one is replaced after a
        while.
        """

        def answers() -> bool:
            pid = self.uploader_of(agent)
            if pid is None:
                return False
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
                return connection.connect_ex(self.socket_of_uploader(pid)) == 0

        self.waits_for(answers, "an uploader that serves")

    @staticmethod
    def socket_of_uploader(pid: int) -> str:
        words = _words(pid)
        return decode(UploaderConfig, words[words.index(UPLOADER) + 1], what="a configuration").socket_path

    @property
    def last_step(self) -> int:
        return int(run_records.lines(self.run.metrics)[-1]["step"])

    def tree(self) -> dict[str, int]:
        """Every file below the run directory with its modification time in ns.

        Equal trees mean that nothing was written.
        """
        return {
            str(path): path.stat().st_mtime_ns for path in sorted(self.run.local.rglob("*")) if path.is_file()
        }

    @property
    def output(self) -> str:
        return "\n".join(f"--- {agent.words!r}\n{agent.output}" for agent in self.agents)

    def inspects(self, *words: str) -> tuple[int, Any]:
        """Exit code and JSON of `elastic-train WORDS --json`, run in this process."""
        with redirect_stdout(io.StringIO()) as printed:
            code = main([*words, "--json"])
        return code, json.loads(printed.getvalue())

    def is_committed(self, step: int) -> bool:
        return any(self.run.local.glob(f"checkpoints/{step:012d}/*/COMMIT.json"))

    def drains(self, agent: Agent, step: int, ranks: int = 1) -> None:
        """SIGTERM while ranks stand before a step: the agent leaves, and its state is saved."""
        self.stands(step, ranks)
        before = len(self.events("drain_requested"))
        agent.signal(signal.SIGTERM)
        self.waits_for(lambda: len(self.events("drain_requested")) > before, "the drain")
        self.open(step)
        agent.ends_with(75)
        assert " is saved" in agent.output.splitlines()[-1]

    def ends_like(self, undisturbed: "Undisturbed", *agents: Agent) -> None:
        for agent in agents:
            agent.ends_with(0)
        self.is_like(undisturbed)

    def is_like(self, undisturbed: "Undisturbed") -> None:
        """Assert the same digest at the end, and every step once, in order, with the same chain."""
        with readable(self.run) as run:
            events, lines = run_records.events(run.events), run_records.lines(run.metrics)
        finished = run_records.matching(events, "run_finished")
        assert [event["digest"] for event in finished] == [undisturbed.digest], self.output
        assert [line["step"] for line in lines] == list(range(1, len(undisturbed.chains) + 1))
        assert [line["chain"] for line in lines] == undisturbed.chains

    # The end.

    def alive(self) -> list[int]:
        """Every process that this drill started, directly or not: all have its folder as theirs."""
        return [pid for pid in _processes() if _folder(pid) == self.folder and pid != os.getpid()]

    def all_are_gone(self) -> None:
        wait_for(lambda: not self.alive(), "the end of all processes")

    def close(self) -> list[int]:
        """End everything; returns the processes that outlived their agents."""
        for agent in self.agents:
            if agent.process.poll() is None:
                os.kill(agent.process.pid, signal.SIGKILL)  # alone: what outlives it is to be seen
                agent.wait()
        with suppress(TimeoutError):
            self.all_are_gone()
        survivors = self.alive()
        for pid in survivors:
            os.kill(pid, signal.SIGKILL)
        return survivors


class Undisturbed:
    """The run in which nothing broke: one worker, from start to end."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir.parse(str(folder / "run"))
        (finished,) = (e for e in run_records.events(self.run.events) if e["event"] == "run_finished")
        self.digest = finished["digest"]
        self.chains = [line["chain"] for line in run_records.lines(self.run.metrics)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == RECIPES.parent:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
def recipes() -> Path:
    return RECIPES


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Spawner]:
    pin_threads()  # as the command does
    os.environ[HASH_SEED] = "0"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that starts the tests in the background has them ignore Ctrl-C, and all that they
        # start inherits it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with closing(Spawner(print)) as server:
        server.preload((*OF_AGENT, *OF_EXAMPLES))
        yield server


@pytest.fixture
def drills(fork_server: Spawner) -> Iterator[Callable[[Path], Drill]]:
    """Several working directories: each call makes a drill in a new folder."""
    made: list[Drill] = []

    def make(folder: Path) -> Drill:
        folder.mkdir(parents=True, exist_ok=True)
        made.append(Drill(folder, fork_server))
        return made[-1]

    yield make
    survivors = {drill: drill.close() for drill in made}
    for drill, pids in survivors.items():
        assert not pids, f"processes outlived their agents: {pids}\n{drill.output}"


@pytest.fixture
def drill(drills: Callable[[Path], Drill], tmp_path: Path) -> Drill:
    return drills(tmp_path)


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Callable[..., EtcdServers]]:
    """Starts etcd servers that a test may break."""
    with ExitStack() as stack:
        folder = tmp_path / "etcd"
        folder.mkdir()
        yield lambda **how: stack.enter_context(closing(EtcdServers(folder, **how)))


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, fork_server: Spawner) -> Callable[..., Path]:
    """Do something to a drill in a folder, once for all processes of a pytest-xdist session."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, make: Callable[[Drill], None]) -> Path:
        folder = shared / f"once-{name}"
        with (shared / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "made").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                with closing(Drill(folder, fork_server)) as drill:
                    make(drill)
                (folder / "made").touch()
        return folder

    return made


@pytest.fixture(scope="session")
def reference(once: Callable[..., Path]) -> Callable[..., Undisturbed]:
    """Train a recipe with one worker and without faults, once for all tests of a session."""
    return lambda name, **options: Undisturbed(once(name, lambda drill: drill.start(**options).ends_with(0)))


@pytest.fixture(scope="session")
def undisturbed(reference: Callable[..., Undisturbed]) -> Undisturbed:
    """The reference of the recipe."""
    return reference("undisturbed")


@pytest.fixture
def stopped(once: Callable[..., Path], drill: Drill) -> Drill:
    """A drill whose run was drained after step 20; checkpoints are of steps 4, 8, 12, 16 and 20."""
    shutil.copytree(once("stopped", _train_and_stop) / "run", drill.run.local)
    return drill


def _train_and_stop(drill: Drill) -> None:
    drill.shut(5, 9, 13, 17, 20)
    agent = drill.start("--keep", "9")
    # A waiting save is dropped for a newer one, so each must be committed before the next.
    for gate in (5, 9, 13, 17):
        drill.stands(gate, ranks=1)
        drill.happens("checkpoint_committed", step=gate - 1)
        drill.open(gate)
    drill.drains(agent, 20)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _folder(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return None


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
