"""A worker that is forked cannot be told from one that is started, but by the time that takes; and it never outlives those it belongs to."""

import json
import os
import select
import signal
import site
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastic.agent.workers import spawner as spawner_module
from elastic.agent.workers.fork_server_client import ForkedProcess
from elastic.agent.workers.node_workers import Workers, WorkerStart
from elastic.agent.workers.process import ProcessStart, kill_session, spawn, wait_any_exit
from elastic.agent.workers.spawner import Spawner, installed_code
from elastic.config import environment

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

FOR_EVER_S = 10_000.0  # the test's own timeout is far below: who waits for this long in vain has failed

PRINTED = "printed before the recipe\n"
PRINTS = f"import sys\nsys.stderr.write({PRINTED!r})\n"

RECIPE = """
import json, os, signal, subprocess, sys, threading
import beside

def tell():
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    told = {
        "environment": dict(os.environ), "c_environment": repr(sorted(subprocess.run(["env", "-0"], capture_output=True).stdout.split(b"\\0"))),
        "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "name": __name__, "file": __file__,
        "main": sys.modules["__main__"].__file__, "flags": repr(sys.flags), "write_through": sys.stdout.write_through,
        "stdin": os.readlink("/proc/self/fd/0"), "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "signals": {number.name: str(signal.getsignal(number)).partition(" at ")[0] for number in signal.Signals},
        "woken": signal.set_wakeup_fd(-1), "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "descriptors": len([number for number in descriptors if number > 2]),
        "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
        "beside": [beside.VALUE, beside.RANK, beside.__file__],
    }
    import torch
    told["torch"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
    print(json.dumps(told))

match sys.argv[1]:
    case "tell":
        tell()
        print("to stderr", file=sys.stderr)
    case "draw":
        import numpy, random, torch
        print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed())
    case "raise":
        raise KeyError("the recipe's own")
    case "exit":
        sys.exit(int(sys.argv[2]))
    case "signal":
        os.kill(os.getpid(), int(sys.argv[2]))
    case "stand" | "stand-alone":
        child = os.fork() if sys.argv[1] == "stand" else os.getpid()
        if child:
            print(os.getpid(), child, flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
"""


class Node:
    """One spawner, its recipe, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.py"
        self.recipe.write_text(RECIPE)
        self.is_beside("VALUE = 1")
        self.said: list[str] = []
        self.logs = 0
        self.spawner = Spawner(self.recipe, self.said.append)

    def is_beside(self, text: str) -> None:
        """Write the local module that the recipe imports."""
        (self.folder / "beside.py").write_text(f"import os\nRANK = os.environ['RANK']\n{text}\n")

    @property
    def fork_server_pid(self) -> int:
        assert self.spawner._parent is not None
        return self.spawner._parent.pid

    def runs(self, start, *arguments, env=None):
        """Run to its end; gives the exit code and what it printed after PRINTED."""
        with tempfile.TemporaryFile() as log:
            child = start(
                ProcessStart(
                    words=(str(self.recipe), *arguments),
                    env=os.environ | {"RANK": "3"} | (env or {}),
                    out=log.fileno(),
                    err=log.fileno(),
                )
            )
            while child.poll() is None:
                wait_any_exit([child], FOR_EVER_S)
            log.seek(0)
            before, _, printed = log.read().decode().partition(PRINTED)
            assert not before
            return child.poll(), printed

    def crew(self, *arguments: str, size: int = 1) -> Workers:
        self.logs += 1
        plans = [
            WorkerStart(
                rank=rank,
                local_rank=rank,
                env=os.environ | {"RANK": str(rank)},
                log=self.folder / f"logs-{self.logs}" / f"rank{rank}.log",
            )
            for rank in range(size)
        ]
        return Workers(plans, (str(self.recipe), *arguments), self.spawner.start)

    def stand(self, size: int) -> tuple[Workers, list[int]]:
        """Workers that ignore SIGTERM and have a child each; gives all their pids once they stand."""
        workers = self.crew("stand", size=size)
        logs = [self.folder / f"logs-{self.logs}" / f"rank{rank}.log" for rank in range(size)]
        while not all(log.read_text().count("\n") == 2 for log in logs):
            workers.wait(0.02)
            assert not workers.poll(), [log.read_text() for log in logs]
        return workers, [int(word) for log in logs for word in log.read_text().splitlines()[1].split()]


@pytest.fixture(scope="module")
def pinned(tmp_path_factory):
    """The environment in which an agent starts everything; each interpreter prints PRINTED at its start."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            patch.setenv(name, "1")
        patch.setenv("NOT_UTF_8", os.fsdecode(b"\xff"))
        folder = tmp_path_factory.mktemp("site")
        (folder / "sitecustomize.py").write_text(PRINTS)
        patch.setenv("PYTHONPATH", str(folder))
        environment.pin_threads()
        yield patch


@pytest.fixture(scope="module")
def node(pinned, tmp_path_factory):
    """Shared: importing takes seconds. What it said is forgotten before each test by `fresh_words`."""
    node = Node(tmp_path_factory.mktemp("node"))
    with node.spawner:
        yield node


@pytest.fixture(autouse=True)
def fresh_words(request):
    if "node" in request.fixturenames:
        request.getfixturevalue("node").said.clear()


def dies(pid: int) -> None:
    """Wait for the end of a process, whose parent may not have asked for its code."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([end], [], [])
    os.close(end)


def test_a_forked_worker_sees_what_a_started_one_sees(node):
    """One script tells all that it can see of its process; environment variables, arguments, folders, signals and descriptors must agree.

    So must what importing printed: each interpreter says something at its start.
    """
    variables = {"ONLY_HERE": "x" * 100_000, "LINES": "a\nb"}
    warm, cold = (
        node.runs(start, "tell", "--a", "b c", "", env=variables) for start in (node.spawner.start, spawn)
    )
    assert warm[0] == cold[0] == 0
    assert warm[1].splitlines()[1:] == cold[1].splitlines()[1:] == ["to stderr"]
    assert json.loads(warm[1].splitlines()[0]) == json.loads(cold[1].splitlines()[0])
    assert json.loads(warm[1].splitlines()[0])["environment"]["ONLY_HERE"] == "x" * 100_000
    assert not node.said


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["exit", "7"], 7),
        (["raise"], 1),
        (["signal", str(int(signal.SIGTERM))], -signal.SIGTERM),
        (["signal", str(int(signal.SIGKILL))], -signal.SIGKILL),
    ],
)
def test_a_forked_worker_ends_as_a_started_one(node, words, code):
    """Exit codes, a traceback from the recipe's first line on, and signals that end the worker itself."""
    warm, cold = (node.runs(start, *words) for start in (node.spawner.start, spawn))
    assert warm == cold
    assert warm[0] == code
    assert not node.said


def test_local_modules_are_run_anew_by_every_worker_under_its_own_environment(node):
    """The module beside the recipe is edited between two workers, and reads RANK when it is imported."""
    found = []
    for rank, text in enumerate(["VALUE = 'first'", "VALUE = 'the second'"]):
        node.is_beside(text)
        code, printed = node.runs(node.spawner.start, "tell", env={"RANK": str(rank)})
        assert code == 0, printed
        found.append(json.loads(printed.splitlines()[0])["beside"][:2])
    assert found == [["first", "0"], ["the second", "1"]]
    assert not node.said


def test_two_forked_workers_draw_different_random_numbers(node):
    """Both inherit generators that nobody seeded: of the interpreter, of numpy and of torch."""
    (_, one), (_, other) = (node.runs(node.spawner.start, "draw") for _ in range(2))
    assert all(float(a) != float(b) for a, b in zip(one.split(), other.split(), strict=True)), (one, other)


def test_a_local_module_with_the_name_of_an_installed_one_is_used(node):
    """The warm parent holds the installed torchvision; a file of that name appears beside the recipe, and goes again."""
    shadow = node.folder / "torchvision.py"
    try:
        shadow.write_text("raise SystemExit(42)")
        node.is_beside("import torchvision")
        assert node.runs(node.spawner.start, "exit", "0")[0] == 42
        assert "torchvision.py has the name of an installed module" in node.said[0]
    finally:
        shadow.unlink()
        node.is_beside("VALUE = 1")
    workers = node.crew("exit", "5")
    assert isinstance(workers._children[0], ForkedProcess)
    workers.kill()


def test_a_thread_that_an_import_leaves_behind_means_a_cold_start_that_is_said(pinned, tmp_path):
    """A profiler starts a thread in every interpreter through sitecustomize, the warm parent's included."""
    (tmp_path / "sitecustomize.py").write_text(
        PRINTS + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        node = Node(tmp_path)
        with node.spawner:
            for _ in range(2):
                assert node.runs(node.spawner.start, "exit", "6") == (6, "")
    assert [words for words in node.said if "1 threads" in words] == node.said
    assert len(node.said) == 1


def test_a_warm_parent_that_fails_while_it_imports_is_quoted_and_not_tried_again(pinned, tmp_path):
    """The recipe is not there yet when it looks."""
    node = Node(tmp_path)
    node.spawner.__exit__(None, None, None)
    late = node.folder / "late.py"
    node.spawner, node.recipe = Spawner(late, node.said.append), late
    with node.spawner:
        dies(node.fork_server_pid)
        late.write_text("raise SystemExit(9)")
        for _ in range(2):
            assert node.runs(node.spawner.start)[0] == 9
            node.spawner.renew()
    assert len(node.said) == 1
    assert "FileNotFoundError" in node.said[0]


def test_a_warm_parent_that_is_killed_while_it_imports_has_a_successor(pinned, tmp_path):
    """As the kernel does for want of memory. The workers of that generation start cold, those of the next are forked."""
    node = Node(tmp_path)
    with node.spawner:
        os.kill(node.fork_server_pid, signal.SIGKILL)
        for _ in range(2):  # workers of one generation
            assert node.runs(node.spawner.start, "exit", "7")[0] == 7
        assert not node.spawner._parent.is_alive
        node.spawner.renew()
        assert node.runs(node.spawner.start, "exit", "7")[0] == 7
        assert node.spawner._parent.is_alive
    assert [words.partition(":")[0] for words in node.said] == [
        "workers are not forked from the warm parent but started one by one",
        "the warm parent died; another one is started",
    ]


def test_workers_die_with_a_warm_parent_that_is_killed_and_the_next_ones_have_another(node, monkeypatch):
    """SIGTERM and SIGINT of a scheduler pass it by; then it gets SIGKILL, and the wait for its workers ends by itself."""
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(node.fork_server_pid, number)
    workers, pids = node.stand(2)
    first = node.fork_server_pid
    os.kill(first, signal.SIGKILL)
    workers.wait(FOR_EVER_S)
    assert sorted(workers.poll()) == [0, 1]
    assert workers.codes == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert workers.kill() == []
    for pid in pids:
        dies(pid)
    # This library's own files may be edited while its tests run.
    monkeypatch.setattr(spawner_module, "installed_code", lambda: node.spawner._code)
    node.spawner.renew()
    assert node.fork_server_pid != first
    assert node.runs(node.spawner.start, "exit", "4") == (4, "")
    assert node.said == ["the warm parent died; another one is started"]


def test_an_end_ends_the_wait_and_kill_leaves_nothing(node):
    """Rank 1 of three is shot; then all are killed, with the children that they forked and their deaf ears for SIGTERM."""
    workers, pids = node.stand(3)
    os.kill(workers.pids[1], signal.SIGKILL)
    workers.wait(FOR_EVER_S)
    assert workers.poll() == [1]
    workers.terminate()
    assert workers.kill() == [0, 2]
    assert workers.codes == dict.fromkeys((1, 0, 2), -signal.SIGKILL)
    assert workers.killed == {0, 2}
    for pid in pids:
        dies(pid)
    assert not node.said


def test_an_end_that_was_told_together_with_something_else_ends_the_wait(node):
    """The socket is silent by then: the word came in with another answer."""
    workers = node.crew("exit", "0", size=1)
    assert (
        node.runs(node.spawner.start, "exit", "0")[0] == 0
    )  # takes in what the parent says, until both have ended
    while node.spawner._parent.code(workers.pids[0]) is None:
        wait_any_exit([workers._children[0]], FOR_EVER_S)
    workers.wait(FOR_EVER_S)
    assert workers.poll() == [0]


def test_a_worker_that_does_not_lead_its_session_yet_is_killed_all_the_same():
    """A real process without a group of its own stands for one that was forked a moment ago."""
    process = subprocess.Popen([sys.executable, "-c", "import signal\nwhile True: signal.pause()"])

    class Young:
        pid = process.pid
        poll = staticmethod(process.poll)

    kill_session(Young)
    assert process.wait() == -signal.SIGKILL


STAND_IN = """
import os, signal, sys
from pathlib import Path
from elastic.agent.workers.spawner import Spawner
from elastic.agent.workers.node_workers import WorkerStart, Workers
recipe, log = Path(sys.argv[1]), Path(sys.argv[2])
spawner = Spawner(recipe, print)
print(spawner._parent.pid, flush=True)
if sys.argv[3] == "ready":
    plan = WorkerStart(rank=0, local_rank=0, env=os.environ | {"RANK": "0"}, log=log)
    workers = Workers([plan], (str(recipe), "stand-alone"), spawner.start)
    while log.read_text().count("\\n") < 2:
        workers.wait(0.02)
    print(workers.pids[0], flush=True)
while True:
    signal.pause()
"""


SPLITTER = """
import json, os, sys, tempfile, threading
from pathlib import Path
from elastic.agent.workers.process import ProcessStart, spawn, wait_any_exit
from elastic.agent.workers.spawner import Spawner
from elastic.agent.workers.fork_server_client import ForkServerClient
from elastic.config.environment import pin_threads
from elastic.worker import fork_server as warm
pin_threads()
recipe = Path(sys.argv[1])
if sys.argv[2] == "with a thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
with Spawner(recipe, lambda words: print(words, file=sys.stderr), lambda recipe: ForkServerClient.split_off(recipe, warm.go_on)) as spawner:
    for start in (spawner.start, spawn):
        with tempfile.TemporaryFile() as log:
            child = start(ProcessStart(words=(str(recipe), "tell", "--a"), env=os.environ | {"RANK": "3"}, out=log.fileno(), err=log.fileno()))
            while child.poll() is None:
                wait_any_exit([child], 1000.0)
            log.seek(0)
            print(json.dumps({"code": child.poll(), "kind": type(child).__name__, "printed": log.read().decode()}), flush=True)
"""


@pytest.mark.parametrize("how", ["alone", "with a thread"])
def test_a_worker_of_a_parent_that_split_off_sees_what_a_started_one_sees(node, how):
    """The agent has imported torch and forks itself; with a thread beside it, it starts a new process instead. Both fork workers."""
    done = subprocess.run(
        [sys.executable, "-c", SPLITTER, str(node.recipe), how], capture_output=True, text=True, check=True
    )
    assert not done.stderr.replace(PRINTED, "")
    warm, cold = (json.loads(line) for line in done.stdout.splitlines())
    assert (warm["code"], warm["kind"]) == (0, "ForkedProcess")
    assert (cold["code"], cold["kind"]) == (0, "SpawnedProcess")
    saw_warm, saw_cold = (
        json.loads(each["printed"].replace(PRINTED, "").splitlines()[0]) for each in (warm, cold)
    )
    # Its interpreter was started by the agent's own command line.
    for seen in (saw_warm, saw_cold):
        del seen["flags"]
    assert saw_warm == saw_cold


def test_a_worker_does_not_undo_what_the_warm_parent_imported(node, monkeypatch):
    """A folder that a package made for itself when it was imported would be gone with the first worker that ends."""
    script = node.folder / "finalizers.py"
    script.write_text("import weakref, torch\nprint(sum(f.atexit for f in weakref.finalize._registry))\n")
    monkeypatch.setattr(node, "recipe", script)
    assert node.runs(node.spawner.start)[1].splitlines()[0] == "0"


@pytest.mark.parametrize("when", ["importing", "ready"])
def test_nothing_is_left_of_an_agent_that_is_killed(node, when):
    """A stand-in for the agent gets SIGKILL: while its warm parent imports, and once a worker of it stands."""
    agent = subprocess.Popen(
        [sys.executable, "-c", STAND_IN, str(node.recipe), str(node.folder / f"{when}.log"), when],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    pids = [int(agent.stdout.readline()) for _ in range(2 if when == "ready" else 1)]
    agent.kill()
    agent.wait()
    agent.stdout.close()
    for pid in pids:
        dies(pid)


def test_ctrl_c_while_everything_imports_leaves_nothing(drill):
    """The warm parent splits off and goes on importing; the drill's own end finds what was left."""
    agent = drill.start_anew()
    drill.waits_for(lambda: len(drill.alive()) > 1, "the warm parent")
    agent.signal(signal.SIGINT)
    agent.ends_with(130)
    drill.all_are_gone()
    assert not drill.run.local.exists()


def test_installing_a_package_renews_the_warm_parent_and_caching_byte_code_does_not(
    node, tmp_path, monkeypatch
):
    """A folder of packages that the test owns stands in for the real one: the warm parent is asked to be renewed after each change."""
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(spawner_module.elastic, "__path__", [])  # its files may be edited while the tests run
    (tmp_path / "old").mkdir()
    monkeypatch.setattr(node.spawner, "_code", installed_code())
    first = node.fork_server_pid
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "old" / "__pycache__").mkdir()
    node.spawner.renew()
    assert (node.fork_server_pid, node.said) == (first, [])
    (tmp_path / "old-2.0.dist-info").mkdir()
    node.spawner.renew()
    assert node.fork_server_pid != first
    dies(first)
    assert node.runs(node.spawner.start, "exit", "3") == (3, "")
    assert node.said == ["installed code has changed; the warm parent imports it anew"]
