"""`start` fixes what a run's result depends on before anything is written, drawn or sent.

Seed, global batch and shards come from the recipe; the launcher adds recipe, arguments and threads.
A run directory that holds another run is refused with what differs. If the agent only asks what the
recipe declares (preflight), the answer is written down and the process ends here.
"""

import hashlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from elastic.checkpoint import stop_record
from elastic.checkpoint.stop_record import StopRecord
from elastic.config import environment, identity
from elastic.config.identity import Identity
from elastic.config.run_dir import RunDir
from elastic.data import random_streams
from elastic.errors import UsageError
from elastic.observe.log import EventLog
from elastic.storage.remote import open_store
from elastic.storage.store import create_or_read
from elastic.system import forked_child
from elastic.system.clock import SystemClock, share_boot_wall_s
from elastic.system.control_page import ControlPage
from elastic.train import refuse, standalone
from elastic.train.groups import ProcessGroups, device_of, has_own_gpu, open_process_groups
from elastic.train.loop.build import Begun, WorkerParts
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
    if not environment.began_as_standby():  # the workers beside it have told
        preload.tell(launch)
    if shards < 1 or global_batch < 1 or global_batch % shards:
        nearest = max(1, round(global_batch / max(1, shards))) * max(1, shards)
        raise UsageError(
            f"expected shards of at least 1 and a global batch that they divide, found {shards} and {global_batch}; try {max(1, shards)} and {nearest}"
        )
    ours = _identity(seed, global_batch, shards)
    if launch.preflight is not None:
        Path(launch.preflight).write_bytes(ours.to_json())
        raise SystemExit(0)
    _be_deterministic(ours.threads)
    refuse.wrappers()
    begun = Begun(
        launch=launch,
        identity=ours,
        run_dir=RunDir.parse(launch.run_dir or f"runs/{ours.recipe.removesuffix('.py')}"),
        device=device_of(launch, backend),
        backend=backend,
        step_functions=StepFunctions(),
    )
    random_streams.enter(seed, "start")
    return Run(begun, partial(_open, begun))


def _open(begun: Begun) -> WorkerParts:
    """The assignment of this process, and what belongs to it; a standby waits here."""
    ours, run_dir = begun.identity, begun.run_dir
    assignment = environment.read_assignment()
    if assignment.world_size > ours.shards:
        raise UsageError(
            f"expected at most as many workers as shards ({ours.shards}), found {assignment.world_size}; start fewer, or begin a run with more shards"
        )
    if assignment.agent is None:
        standalone.handle_ctrl_c()
    groups = open_process_groups(begun.launch, assignment, begun.device)
    if assignment.agent is None:
        ours = standalone.begin(begun.launch, run_dir, groups, ours)
    else:
        share_boot_wall_s(assignment.agent.boot_wall_s)
        ours = replace(ours, parent=assignment.agent.parent)  # the agent has found it
    stopped, own_gpus = _claim_run_dir(groups, ours, run_dir.url, has_own_gpu(begun.launch, begun.device))
    if groups.store is not None and begun.backend != "gloo" and (begun.backend == "nccl" or own_gpus):
        groups = groups.with_nccl()
    link = assignment.agent or standalone.link(run_dir, groups, ours)
    # One file for all generations of this local rank: a report of a long run of many nodes
    # would open thousands otherwise.
    events = run_dir.events / f"{link.node}-worker{groups.local_rank}.jsonl"
    log = EventLog(events, node=link.node, clock=SystemClock())
    log.generation = link.generation
    if assignment.agent is None:  # the end of the script needs what was registered above: last in, first out
        forked_child.at_own_exit(standalone.end_script)
    page = ControlPage.open(link.control_page)
    heartbeat = HeartbeatSender(page, groups.local_rank)
    return WorkerParts(
        groups=replace(groups, waiting=heartbeat.waiting),
        link=link,
        identity=ours,
        run_dir=run_dir,
        page=page,
        heartbeat=heartbeat,
        log=log,
        check=begun.launch.check,
        stopped=stopped,
        step_functions=begun.step_functions,
    )


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


def _claim_run_dir(
    groups: ProcessGroups, ours: Identity, run_dir: str, has_gpu: bool
) -> tuple[StopRecord | None, bool]:
    """Rank 0 writes the identity if there is none; every rank compares its own with the one there.

    Returns where the run has ended early, if it has, and whether every worker has a GPU of its own.
    Raises UsageError for another run's directory.
    """
    there, ended = "", ""
    if groups.rank == 0:
        store, clock = open_store(run_dir), SystemClock()
        there = create_or_read(store, identity.NAME, ours.to_json(), clock).decode(errors="replace")
        stopped = stop_record.read(store, ours.run_id, clock)
        ended = "" if stopped is None else stopped.to_json().decode()
    told = groups.all_gather((there, ended, has_gpu))
    there, ended, _ = told[0]
    identity.check(identity.parse(there.encode()), ours, run_dir)
    return stop_record.parse(ended.encode()) if ended else None, all(each[2] for each in told)
