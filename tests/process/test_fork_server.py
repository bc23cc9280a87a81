"""A forked worker differs from a spawned one only in the time that its start takes, and never
outlives the fork server or the agent.
"""

import os
import select
import signal
import sys
import sysconfig
import tempfile
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.agent.preflight import declared_identity
from elastic.agent.worker_process import Spawner
from elastic.agent.workers import NodeWorkers, WorkerStart
from elastic.config import environment
from elastic.system import stop_signals
from elastic.system.worker_protocol import StartRequest

# In one process of pytest: each would import for a node of its own.
pytestmark = pytest.mark.xdist_group("fork server")

FOR_EVER_S = 10_000.0  # the test's own timeout ends a wait that is in vain

PRINTED = "printed before the recipe\n"
# Every interpreter of these tests runs this at its start. None in sys.modules makes an import fail:
# a fork server that imports only torch itself is ready in half the time.
AT_START = f"""
import sys
sys.stderr.write({PRINTED!r})
sys.modules["torch._dynamo"] = sys.modules["torchvision"] = None
"""

RECIPE = """
import json, os, signal, subprocess, sys, threading
import beside

def show():
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    seen = {
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
    seen["torch"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
    print(json.dumps(seen, sort_keys=True))

match sys.argv[1]:
    case "inherits":
        print([name for name in sys.argv[2:] if name in sys.modules])
    case "show":
        show()
        print("to stderr", file=sys.stderr)
    case "raise":
        raise KeyError("the recipe's own")
    case "exit":
        sys.exit(int(sys.argv[2]))
    case "signal":
        os.kill(os.getpid(), int(sys.argv[2]))
    case "leave":
        if not (child := os.fork()):
            signal.pause()
        print(child, flush=True)
        os._exit(0)
    case "stand":
        if child := os.fork():
            print(os.getpid(), child, flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
"""


class Node:
    """One spawner, its recipe, and the lines that it reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.py"
        self.recipe.write_text(RECIPE)
        self.is_beside("VALUE = 1")
        self.reported: list[str] = []
        self.spawner = Spawner(self.reported.append)
        self.spawns = Spawner(self.reported.append, modules=None)

    def close(self) -> None:
        self.spawner.close()
        self.spawns.close()

    def is_beside(self, text: str) -> None:
        """Write the local module that the recipe imports."""
        (self.folder / "beside.py").write_text(f"import os\nRANK = os.environ['RANK']\n{text}\n")

    def request(self, *arguments, env=None):
        variables = os.environ | {"RANK": "3"} | (env or {})
        return StartRequest(command=(str(self.recipe), *arguments), env=variables)

    def runs(self, start, *arguments, env=None):
        """Run to the end; returns the exit code and what the process printed after PRINTED."""
        with tempfile.TemporaryFile() as log:
            process = start(self.request(*arguments, env=env), log.fileno(), log.fileno())
            while process.poll() is None:
                process.spawner.wait(FOR_EVER_S)
            log.seek(0)
            before, _, printed = log.read().decode().partition(PRINTED)
            assert not before
            return process.poll(), printed

    def stand(self) -> tuple[NodeWorkers, list[int]]:
        """Two workers that ignore SIGTERM and have a child each; returns all their pids once they
        have started.
        """
        logs = [self.folder / f"rank{rank}.log" for rank in range(2)]
        starts = [
            WorkerStart(
                rank=rank,
                local_rank=rank,
                request=self.request("stand", env={"RANK": str(rank)}),
                assignment={},
                log=log,
            )
            for rank, log in enumerate(logs)
        ]
        page, settings = SimpleNamespace(open_step=lambda _: None), SimpleNamespace(imports_library=True)
        ignored = {name: lambda *_: None for name in ("record", "follow", "print_line")}
        told = SimpleNamespace(monotonic=time.monotonic, **ignored)
        quiet = dict.fromkeys(("log", "console", "clock"), told)
        parts = SimpleNamespace(spawner=self.spawner, page=page, settings=settings, **quiet)
        workers = NodeWorkers(starts, parts, lambda _: None)
        while not all(log.read_text().count("\n") == 2 for log in logs):
            workers.wait(0.02)
            assert not workers.poll(), [log.read_text() for log in logs]
        return workers, [int(word) for log in logs for word in log.read_text().splitlines()[1].split()]


@pytest.fixture(scope="module")
def pinned(tmp_path_factory, fork_server):
    """The environment in which an agent starts everything; each interpreter runs AT_START.

    fork_server: the session's, which other tests use and which must not begin in it.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            patch.setenv(name, "1")
        patch.setenv("NOT_UTF_8", os.fsdecode(b"\xff"))
        base = tmp_path_factory.mktemp("site")
        patch.setenv("PYTHONUSERBASE", str(base))  # below which packages count as installed
        folder = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(base)}))
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(AT_START)
        (folder / "setting.py").write_text("import os\nos.environ['SETTING'] = '1'\n")
        patch.setenv("PYTHONPATH", str(folder))
        environment.pin_threads()
        yield patch


@pytest.fixture(scope="module")
def node(pinned, tmp_path_factory):
    """Shared: importing takes seconds. `forget_reports` runs before each test."""
    node = Node(tmp_path_factory.mktemp("node"))
    with closing(node):
        yield node


@pytest.fixture(autouse=True)
def forget_reports(request):
    if "node" in request.fixturenames:
        request.getfixturevalue("node").reported.clear()


def dies(pid: int) -> None:
    """Wait for the exit of a process, which may stay a zombie."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([end], [], [])
    os.close(end)


@pytest.mark.parametrize(
    ("words", "code"), [(["show", "--a", "b c", ""], 0), (["raise"], 1), (["signal", "15"], -signal.SIGTERM)]
)
def test_a_forked_worker_is_to_its_script_as_a_spawned_one(node, words, code):
    """The script shows all that it can see of its process: environment, arguments, folders, signals
    and descriptors. It exits, with a traceback that begins at the recipe, or by a signal.

    The two outputs must be equal, also in what imports printed: each interpreter prints a line at
    its start.
    """
    variables = {"ONLY_HERE": "x" * 100_000, "LINES": "a\nb"}
    forked, spawned = (
        node.runs(start, *words, env=variables) for start in (node.spawner.start, node.spawns.start)
    )
    assert forked == spawned
    assert forked[0] == code
    if words[0] == "show":
        assert variables["ONLY_HERE"] in forked[1] and forked[1].endswith("to stderr\n")
    assert not node.reported


def test_a_local_module_hides_an_installed_one_of_its_name(node):
    """The fork server holds the installed numpy; a file of that name appears beside the recipe and
    goes again.
    """
    shadow = node.folder / "numpy.py"
    try:
        shadow.write_text("raise SystemExit(42)")
        node.is_beside("import numpy")
        assert node.runs(node.spawner.start, "exit", "0")[0] == 42
        assert "numpy.py has the name of an installed module" in node.reported[0]
    finally:
        shadow.unlink()
        node.is_beside("VALUE = 1")
    assert node.runs(node.spawner.start, "inherits", "torch") == (0, "['torch']\n")


def test_a_worker_inherits_what_its_preflight_has_imported(node, tmp_path):
    """And none of the modules of the user's. `setting` sets a variable when it is imported."""
    recipe, called = tmp_path / "recipe.py", "elastic.start(seed=0, global_batch=8, shards=8)"
    recipe.write_text(f"import elastic, wave, own, setting\nfrom xml.dom import minidom\n{called}\n")
    (tmp_path / "own.py").touch()
    assert node.runs(node.spawner.start, "inherits", "wave") == (0, "[]\n")
    declared_identity(node.spawner, recipe, ())
    names = "wave", "own", "xml.dom.minidom"
    assert node.runs(node.spawner.start, "inherits", *names) == (0, "['wave', 'xml.dom.minidom']\n")
    assert not node.reported


def test_workers_die_with_their_fork_server_and_get_another(node):
    """It ignores what a scheduler sends to every process.

    Then it gets SIGKILL, and the wait for its workers ends by itself.
    """
    for number in stop_signals.ALL:
        os.kill(node.spawner._server.pid, number)
    workers, pids = node.stand()
    first = node.spawner._server.pid
    os.kill(first, signal.SIGKILL)
    workers.wait(FOR_EVER_S)
    assert workers.poll()
    assert {rank: each.code for rank, each in workers.exits.items()} == dict.fromkeys((0, 1), -signal.SIGKILL)
    workers.kill(None)
    assert not workers.killed
    for pid in pids:
        dies(pid)
    node.spawner.renew()
    assert node.spawner._server.pid != first
    assert node.runs(node.spawner.start, "exit", "4") == (4, "")
    assert node.reported == ["the fork server died; another one is started"]


def test_a_worker_that_exits_takes_its_session_with_it(node):
    """It ends by itself, and its child would live on."""
    code, printed = node.runs(node.spawner.start, "leave")
    dies(int(printed))
    assert code == 0


def test_a_worker_runs_no_finalizers_of_the_fork_server(node, monkeypatch):
    """A temporary folder that a package made when it was imported would be gone with the first
    worker that exits.
    """
    script = node.folder / "finalizers.py"
    script.write_text("import weakref, torch\nprint(sum(f.atexit for f in weakref.finalize._registry))\n")
    monkeypatch.setattr(node, "recipe", script)
    assert node.runs(node.spawner.start)[1].splitlines()[0] == "0"


def test_no_process_imports_a_module_of_the_working_directory(node, drill, tmp_path, monkeypatch):
    """Somebody else's folder, or the common one for temporary files, has files with names of
    modules that they import. `python recipe.py` does not look there. Nor does a server, the worker
    that it spawns, or an uploader.
    """
    for name in ("tenacity", "fsspec", "runpy", "traceback", "selectors", "tempfile"):
        for folder in (tmp_path, drill.folder):
            (folder / f"{name}.py").write_text("open('ran', 'a').write(__name__)\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    with closing(Spawner(print, modules=None)) as server:
        assert node.runs(server.start, "inherits") == (0, "[]\n")
    assert not (tmp_path / "ran").exists()

    drill.start().ends_with(0)  # and its uploader commits
    assert not (drill.folder / "ran").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_end_during_the_imports_leaves_no_process(drill, recipes, number, code):
    """The fork server goes on importing when the agent gets Ctrl-C, or is killed."""
    agent = drill.execute(
        [sys.executable, "-m", "elastic.cli", str(recipes / "tiny.py"), "--run-dir", drill.run.url]
    )
    drill.waits_for(lambda: drill.fork_server_of(agent), "the fork server")
    agent.signal(number)
    agent.ends_with(code)
    drill.all_are_gone()
    assert not drill.run.local.exists()
