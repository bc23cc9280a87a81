"""What the environment says of this process: no other module of the package reads or sets it.

torchrun's variables say who this worker is. `ELASTIC_AGENT`, one JSON object, is what our own agent
adds for the workers of a generation; to the worker that serves its store, `ELASTIC_STORE` gives the
descriptor of the listening socket. A standby begins before there is a generation for it: reading a
variable of its assignment there, also by `in`, `setdefault` or a copy of all, waits until it has
come over `ELASTIC_ASSIGNMENT`, the descriptor of a connection to the agent. `os.environb` and C's
getenv see AWAITED meanwhile. `ELASTIC_PREFLIGHT` is set where an agent only
asks what the recipe declares, and `ELASTIC_CHECK` where `elastic-train check` tries a recipe. A
process that has none of them runs under plain python or torchrun, where `ELASTIC_RUN_DIR` and
`ELASTIC_FROM` stand for the options of the same names. Code outside this package (torch, gloo,
OpenMP, NCCL) reads its own variables; `variables` hands them on to the processes and clients that
need them. `pin_threads`, `fix_hashing` and `set_up_malloc` set what the interpreter and its
libraries read as they begin: this process's children inherit these settings.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from elastic.config.durations import Every
from elastic.config.identity import Origin, Parent
from elastic.config.options import Options
from elastic.divergence import Divergence
from elastic.errors import UsageError
from elastic.system import forked_child
from elastic.system.clock import boot_wall_s
from elastic.system.untrusted import decode, encode, parse_number

AGENT = "ELASTIC_AGENT"
PREFLIGHT = "ELASTIC_PREFLIGHT"
CHECK = "ELASTIC_CHECK"
STORE = "ELASTIC_STORE"
ASSIGNMENT = "ELASTIC_ASSIGNMENT"
# What those variables have in a standby: no number and no address.
AWAITED = "(not known yet)"
RUN_DIR = "ELASTIC_RUN_DIR"
FROM = "ELASTIC_FROM"
# Suffixes of the files in which a preflight leaves why workers must be spawned, or else the
# installed modules that the recipe has imported.
SPAWN, MODULES = ".spawn", ".modules"

# A worker without an agent has no memory in which snapshots outlive it, and starts no other one.
WITHOUT_AGENT = Options(recipe="", run_dir="", snapshot_every=Every(kind="off"), rehearse=Every(kind="off"))

# Large pages; and memory that is freed at the end of the heap stays the process's, up to 256 MiB,
# and arrays up to 32 MiB lie in the heap: glibc's own upper limits.
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=268435456"
HASH_SEED = "PYTHONHASHSEED"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLink:
    """What an agent passes to its workers in addition to torchrun's variables.

    A worker without an agent makes one for itself, of defaults (train/standalone.py). options: as
    the agent has them, but for the recipe's arguments, which a worker has on its command line.
    """

    pid: int
    node: str
    generation: int
    control_page: str
    uploader: str  # path of the uploader's socket
    options: Options = WITHOUT_AGENT
    memory: str = ""  # path of the node's snapshot slots to restore from; empty without a snapshot
    # Why steps are done again, where this agent knows of one.
    divergence: Divergence | None = None
    error_folder: str = ""  # where workers of this generation leave their errors
    parent: Parent | None = None  # the state of another run that this one begins from
    committed_step: int = 0  # of the newest checkpoint that the group knows of
    imports_library: bool = True  # false for a script that uses none of this library
    evidence: str = ""  # where a generation leaves what its last step gave; empty for nowhere
    disturbs: bool = False  # objects lie at other addresses in memory than in a worker before
    boot_wall_s: float = field(default_factory=boot_wall_s)  # of the agent's command (system/clock.py)

    def to_env(self) -> dict[str, str]:
        return {AGENT: json.dumps(encode(self))}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What `elastic-train check` asks of one command and its workers.

    pid: of the check, with which the command ends. trace: where rank 0 writes what each step left
    behind. The run ends after the first step that is at least `least_steps` and comes `seconds`
    after the first one began. leave_at: the step after which the node is told to leave, None for
    none.
    """

    pid: int
    trace: str
    least_steps: int
    seconds: float
    leave_at: int | None

    def to_env(self) -> dict[str, str]:
        return {CHECK: json.dumps(asdict(self))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How this process was started, whatever its assignment."""

    local_rank: int
    local_world_size: int
    preflight: str | None  # path to write the recipe's declaration to
    run_dir: str | None
    check: CheckRequest | None
    origin: Origin | None  # what --from would name, where there is no agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Which worker of which generation this process is."""

    rank: int
    world_size: int
    agent: AgentLink | None
    master: tuple[str, int] | None  # where the store of the process groups is; None without one
    store_fd: int | None  # the socket on which this worker serves that store


def read() -> Launch:
    """How the launcher started this process. Raises UsageError for a malformed variable."""
    return Launch(
        local_rank=_number("LOCAL_RANK", 0),
        local_world_size=_number("LOCAL_WORLD_SIZE", 1),
        preflight=os.environ.get(PREFLIGHT),
        run_dir=os.environ.get(RUN_DIR),
        check=_decode(CheckRequest, CHECK),
        origin=Origin.parse(os.environ[FROM]) if os.environ.get(FROM) else None,
    )


def read_assignment() -> Assignment:
    """A standby waits for it. Raises UsageError for a malformed variable."""
    return Assignment(
        rank=_number("RANK", 0),
        world_size=_number("WORLD_SIZE", 1),
        agent=_decode(AgentLink, AGENT),
        # If torchrun started the agent, the agent's preflight inherits torchrun's MASTER_ADDR.
        master=(os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0))
        if "MASTER_ADDR" in os.environ and PREFLIGHT not in os.environ
        else None,
        store_fd=_number(STORE, 0) if STORE in os.environ else None,
    )


class _Awaiting(type(os.environ)):  # type: ignore[misc] # it has no public name
    """os.environ of a standby."""

    def __getitem__(self, name: str) -> str:
        value = str(super().__getitem__(name))
        if value != AWAITED or forked_child.is_one():  # such a child has no assignment, and gets none
            return value
        _await_assignment()
        return os.environ[name]

    def items(self) -> Any:
        # Every HTTP request looks through all names for those of proxies.
        if sys._getframe(1).f_globals.get("__name__") != "urllib.request":  # noqa: SLF001
            return super().items()
        return [(name, super(_Awaiting, self).__getitem__(name)) for name in self]


@dataclass(slots=True)
class _Waiting:
    """connection: to the agent. made: files and folders that were not there before."""

    connection: Any
    made: set[str] = field(default_factory=set)
    is_told: bool = False
    lock: Any = field(default_factory=threading.RLock)


_standby: list[_Waiting] = []  # at most one
_STARTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
_STARTS |= {"socket.bind", "subprocess.Popen"}
_CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}
LOOK_S = 0.2  # whether a signal's handler has taken the assignment


def begin_standby() -> None:
    """If this process is a standby, it waits from now on where it needs its assignment, and before
    it does what another process may notice: it starts a process, binds a socket, or changes what is
    in a file or folder that it has not made.
    """
    if os.environ.get(ASSIGNMENT):
        from multiprocessing.connection import Connection

        _standby.append(_Waiting(Connection(int(os.environ[ASSIGNMENT]))))
        os.environ.__class__ = _Awaiting
        sys.addaudithook(_before)


def is_standby() -> bool:
    """Whether this process has no assignment yet."""
    return isinstance(os.environ, _Awaiting)


def began_as_standby() -> bool:
    return bool(_standby)


def _before(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook; Python's library reference has the table of events."""
    if (event in _STARTS or event in _CHANGES) and is_standby() and not forked_child.is_one():
        if event == "open" and (args[2] & os.O_APPEND or not args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        paths = args[:2] if event == "os.rename" else args[:1]
        if event in _STARTS or any(_is_noticed(event, path) for path in paths):
            _await_assignment()


def _is_noticed(event: str, path: Any) -> bool:
    """Whether the event changes what is at this path."""
    if isinstance(path, int):  # of what was opened before
        return False
    where = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a name of any kind
    try:
        size_bytes = os.lstat(where).st_size
    except OSError:
        _standby[0].made.add(where)
        return False
    # An empty file has nothing to lose: those of locks are empty, and devices.
    return where not in _standby[0].made and (size_bytes > 0 if event == "open" else event != "os.mkdir")


def _await_assignment() -> None:
    from multiprocessing.reduction import recv_handle

    ours = _standby[0]
    while is_standby():
        with ours.lock:
            if not ours.is_told:
                ours.is_told = True
                ours.connection.send_bytes(b"waits")
            if not ours.connection.poll(LOOK_S) or not is_standby():
                continue
            found: dict[str, str] = json.loads(ours.connection.recv_bytes())
            if STORE in found:
                found[STORE] = str(recv_handle(ours.connection))
            os.environ.update(found | {ASSIGNMENT: ""})  # a walk over all entries may be under way
            os.environ.__class__ = _Awaiting.__base__


def variables() -> dict[str, str]:
    """A copy of all variables, for child processes and for clients such as etcd's."""
    return dict(os.environ)


def completed_line() -> str | None:
    """The command line so far, where a shell asks how it may go on (argcomplete's variables)."""
    return os.environ.get("COMP_LINE") if "_ARGCOMPLETE" in os.environ else None


def replace(by: Mapping[str, str]) -> None:
    """Exchange the whole environment, as if this process had been started with `by`."""
    os.environ.clear()
    os.environ.update(by)


def pin_threads() -> int:
    """Pin the number of intra-op threads for this process's children, and return it.

    It is OMP_NUM_THREADS, or 1 if that is not set: CPU kernels split their sums by threads, so
    another number of threads gives another result. Raises UsageError.
    """
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not threads.isdecimal() or int(threads) < 1:
        raise UsageError(
            f"expected a number of threads in OMP_NUM_THREADS, found {threads!r}; unset it to use 1"
        )
    os.environ.setdefault("MKL_NUM_THREADS", threads)
    # OpenBLAS starts its threads when numpy is imported, and the fork server must have one thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # cuBLAS is deterministic only with a fixed workspace (cuBLAS documentation, section 2.1.4).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    return int(threads)


def fix_hashing() -> str:
    """The same string hashing in all workers: otherwise a set of strings would iterate in another
    order on each node and after each resume. Returns a sentence where that changes a value.
    """
    found = os.environ.get(HASH_SEED)
    os.environ[HASH_SEED] = "0"
    if found in (None, "", "0", "random"):
        return ""
    return f"{HASH_SEED} is 0 in every run, not {found}: sets of strings iterate alike on all nodes and after each resume"


def set_up_malloc() -> None:
    """Have malloc keep freed memory, in large pages, unless the environment says how it works.

    A step frees what the next one allocates. By itself malloc gives the end of the heap back in
    between, and the kernel zeroes its pages anew: a step of ResNet-18 took 7 % longer. A large
    page costs one page fault in place of 512: a worker's first step is a quarter faster, and later
    steps a tenth. glibc reads GLIBC_TUNABLES only when a process starts, asks the kernel itself
    whether there are large pages, and passes over names that it does not know; other C libraries
    read none of it.
    """
    if not {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        os.environ.setdefault("GLIBC_TUNABLES", MALLOC)


def _decode(kind: type[T], name: str) -> T | None:
    try:
        return decode(kind, os.environ[name], what=name) if name in os.environ else None
    except ValueError as error:
        raise UsageError(f"{error}; unset it, which elastic-train sets for its own processes") from error


def _number(name: str, default: int) -> int:
    # The agent's preflight is one process, whatever an outer launcher left in the environment.
    text = str(default) if PREFLIGHT in os.environ else os.environ.get(name, str(default))
    value = parse_number(text)
    if value is None:
        raise UsageError(
            f"expected a number in the environment variable {name}, found {text!r:.80}; the launcher sets it"
        )
    return value
