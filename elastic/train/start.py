"""`start` fixes what a run's result depends on before anything is written, drawn or sent.

Seed, global batch and shards come from the recipe; the launcher adds recipe, arguments and threads.
A run directory that holds another run is refused with what differs. If the agent only asks what the
recipe declares (preflight), the answer is written down and the process ends here.
"""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import torch

from elastic.config import environment, identity
from elastic.config.identity import Identity
from elastic.config.run_dir import RunDir
from elastic.data import random_streams
from elastic.errors import UsageError
from elastic.observe.log import EventLog
from elastic.storage.remote import open_store
from elastic.storage.store import create_or_read
from elastic.system import forked_child
from elastic.system.clock import SystemClock
from elastic.system.control_page import ControlPage
from elastic.train import refuse, standalone
from elastic.train.groups import ProcessGroups, open_process_groups
from elastic.train.loop.build import WorkerParts
from elastic.train.loop.on_step import StepFunctions
from elastic.train.misuse import public
from elastic.train.run import Run
from elastic.worker import preload
from elastic.worker.heartbeat import HeartbeatSender


@public("elastic.start")
def start(*, seed: int, global_batch: int, shards: int = 8, backend: str | None = None) -> Run:
    """Begin or resume the run of this recipe.

    seed: of everything random. global_batch: samples of one step, over all workers. shards: how
    many slices a global batch is cut into; the largest possible world size, and part of the result
    (another number is another trajectory). backend: nccl or gloo for gradients; None takes nccl
    where every worker has its own GPU. Deterministic kernels are switched on. A recipe that needs
    an operation without one may switch them off after this call. Raises UsageError when the numbers
    do not fit, when the run directory holds another run, when it is called twice, and where the
    recipe has drawn from torch's unseeded generator or opened a process group before.
    """
    sys.excepthook = standalone.explain  # an agent catches its workers' errors itself
    refuse.second_start()
    forked_child.begin()
    refuse.own_group()
    refuse.early_draws()
    launch = environment.read()
    preload.tell(launch)
    if shards < 1 or global_batch < 1 or global_batch % shards:
        nearest = max(1, round(global_batch / max(1, shards))) * max(1, shards)
        raise UsageError(
            f"expected shards of at least 1 and a global batch that they divide, found {shards} and {global_batch}; try {max(1, shards)} and {nearest}"
        )
    if launch.world_size > shards:
        raise UsageError(
            f"expected at most as many workers as shards ({shards}), found {launch.world_size}; start fewer, or begin a run with more shards"
        )
    ours = _identity(seed, global_batch, shards)
    if launch.preflight is not None:
        Path(launch.preflight).write_bytes(ours.to_json())
        raise SystemExit(0)
    if launch.agent is None:
        standalone.handle_ctrl_c()
    _be_deterministic(ours.threads)
    groups = open_process_groups(launch, backend)
    if launch.agent is None:
        run_dir, ours = standalone.begin(launch, groups, ours)
    else:
        ours = replace(ours, parent=launch.agent.parent)  # the agent has found it
        run_dir = RunDir.parse(launch.agent.run_dir)
    _claim_run_dir(groups, ours, run_dir.url)
    link = launch.agent or standalone.link(run_dir, groups, ours)
    # One file for all generations of this local rank: a report of a long run of many nodes
    # would open thousands otherwise.
    events = run_dir.events / f"{link.node}-worker{groups.local_rank}.jsonl"
    log = EventLog(events, node=link.node, clock=SystemClock())
    log.generation = link.generation
    random_streams.enter(seed, "start")
    refuse.wrappers()
    if launch.agent is None:  # the end of the script needs what was registered above: last in, first out
        forked_child.at_own_exit(standalone.end_script)
    page = ControlPage.open(link.control_page)
    heartbeat = HeartbeatSender(page, groups.local_rank)
    worker = WorkerParts(
        groups=replace(groups, waiting=heartbeat.waiting),
        link=link,
        identity=ours,
        run_dir=run_dir,
        page=page,
        heartbeat=heartbeat,
        log=log,
        check=launch.check,
        step_functions=StepFunctions(),
    )
    return Run(worker)


def _identity(seed: int, global_batch: int, shards: int) -> Identity:
    recipe = Path(sys.argv[0])
    return Identity(
        recipe=recipe.name,
        recipe_sha256=hashlib.sha256(recipe.read_bytes()).hexdigest() if recipe.is_file() else "",
        arguments=tuple(sys.argv[1:]),
        seed=seed,
        global_batch=global_batch,
        shards=shards,
        torch=str(torch.__version__),
        device="cuda" if torch.cuda.is_available() else "cpu",
        threads=environment.pin_threads(),
    )


def _be_deterministic(threads: int) -> None:
    torch.set_num_threads(threads)
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode=True)
    else:
        # The same without importing torch's compiler, which takes seconds at every start. The
        # compiler reads its own setting from the environment (environment.pin_threads).
        torch._C._set_deterministic_algorithms(True, warn_only=False)  # noqa: SLF001
    # Filling fresh memory with NaN helps to find reads of it, and costs a pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    # The profiling compiler of TorchScript replaces a function's code after its first calls in a
    # process, and the new code may round otherwise.
    torch._C._jit_set_profiling_mode(False)  # noqa: SLF001 - nothing public sets it


def _claim_run_dir(groups: ProcessGroups, ours: Identity, run_dir: str) -> None:
    """Rank 0 writes the identity if there is none; every rank compares its own with the one there.

    Raises UsageError for another run's directory.
    """
    there = ""
    if groups.rank == 0:
        store = open_store(run_dir)
        there = create_or_read(store, identity.NAME, ours.to_json(), SystemClock()).decode(errors="replace")
    identity.check(identity.parse(groups.from_rank0(there).encode()), ours, run_dir)
