"""From a command line to an exit code: everything is checked before anything is written, and everything that was started is ended.

It does not train and does not decide: it puts one node's parts together around the agent.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from elastic import identity, launch_env
from elastic.agent import preflight
from elastic.agent.agent import NodeAgent
from elastic.agent.closing import farewell
from elastic.agent.settings import Settings
from elastic.checkpoint.fsspec_store import open_store
from elastic.checkpoint.handoff import UploaderProcess
from elastic.checkpoint.store import read_small
from elastic.checkpoint.wire import UploaderConfig
from elastic.clock import SystemClock
from elastic.control_page import MAX_WORKERS
from elastic.errors import EXIT_COMPLETE, StoreFailed, UsageError
from elastic.faults import plan
from elastic.identity import Identity
from elastic.observe.console import Tail, open_screen
from elastic.observe.log import EventLog, read_events
from elastic.observe.status import GOODBYES
from elastic.options import Options
from elastic.rendezvous.address import new_node_id, node_address
from elastic.rendezvous.core import Policy
from elastic.rendezvous.directory import DirectoryBackend
from elastic.rendezvous.group import Rendezvous
from elastic.rendezvous.membership import Node
from elastic.rendezvous.torch_handler import ElasticRendezvous, EndpointHost
from elastic.run_dir import RunDir

SAVE_DEADLINE_S = 600.0
STOP_S = 30.0


def launch(options: Options) -> int:
    """Run this node's part of the run; returns the exit code. Raises UsageError before anything was written."""
    recipe = Path(options.recipe)
    uses_library = preflight.uses_library(recipe)
    run = RunDir.parse(options.run_dir)
    nproc = _nproc(options)
    _check_plain(options, run)
    launch_env.pin_threads()
    declared = preflight.ask(recipe, options.recipe_args) if uses_library else None
    if declared is not None:
        _check_declared(options, declared, run, nproc)
    if options.fresh:
        _set_aside(run, _meeting_place(options, run))
    return _run(options, run, nproc, declared)


def _nproc(options: Options) -> int:
    nproc = (torch.cuda.device_count() or 1) if options.nproc_per_node == "auto" else options.nproc_per_node
    if nproc > MAX_WORKERS:
        raise UsageError(f"expected at most {MAX_WORKERS} workers a node, found --nproc-per-node {nproc}")
    return nproc


def _check_plain(options: Options, run: RunDir) -> None:
    """What can be known without the recipe."""
    if options.faults is not None:
        plan.parse(options.faults)
    if run.local.exists() and not run.local.is_dir():
        raise UsageError(f"expected a run directory at {run.local}, found a file; take another --run-dir")
    parent = next(folder for folder in (run.local, *run.local.parents) if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(
            f"expected to write to {parent}, found it read-only; take another --run-dir or change its mode"
        )
    open_store(run.checkpoints_url)  # an unknown protocol or a missing extra is said here


def _check_declared(options: Options, declared: Identity, run: RunDir, nproc: int) -> None:
    if options.max_nodes * nproc > declared.shards:
        raise UsageError(
            f"expected at most as many workers as shards ({declared.shards}), found {options.max_nodes} nodes of {nproc} workers; "
            "lower --max-nodes or --nproc-per-node, or begin a run with more shards"
        )
    if options.fresh:
        return
    try:
        there = read_small(open_store(run.url), identity.NAME, SystemClock())
    except StoreFailed as error:
        raise UsageError(f"expected to read {run.identity_url}, found: {error}") from error
    if there is not None:
        identity.check(identity.parse(there), declared, run.url)


def _set_aside(run: RunDir, meeting_place: Path) -> None:
    """Rename a used run directory; nothing of it is deleted."""
    suffix = time.strftime(".aside-%Y%m%d-%H%M%S")
    # An agent that said goodbye is gone, however young its last beat: exit 76 advises --fresh, which must then work at once.
    gone = {event["node"] for event in read_events(run.events) if event["event"] in GOODBYES}
    if any(
        time.time() - beat.stat().st_mtime < STOP_S
        for beat in meeting_place.glob("beat-*")
        if unquote(beat.name.removeprefix("beat-")) not in gone
    ):
        raise UsageError(
            f"{run.url} is in use, or was until {STOP_S:.0f} s ago; stop its agents before --fresh, and give --fresh to one of them only"
        )
    if run.local.exists():
        run.local.rename(run.local.with_name(run.local.name + suffix))
    if run.is_remote:
        import fsspec  # only here: the other stores are opened by the checkpoint package

        files, root = fsspec.core.url_to_fs(run.url)
        if files.exists(root):
            files.mv(root, root + suffix, recursive=True)


def _run(options: Options, run: RunDir, nproc: int, declared: Identity | None) -> int:
    clock, node = SystemClock(), new_node_id()
    backend = DirectoryBackend(_meeting_place(options, run))
    log = EventLog(run.events / f"{node}-agent.jsonl", node=node, clock=clock)
    address = options.local_addr or node_address(os.environ)
    host = EndpointHost(address)
    with ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="elastic-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        console = Tail(run, open_screen(sys.stdout), clock)
        rendezvous = Rendezvous(
            backend,
            Node(id=node, address=address, nproc=nproc),
            _policy(options, declared),
            keep_alive_s=options.keep_alive_s,
            clock=clock,
            open_endpoint=host.open,
            say=lambda reason, aloud: console.say(reason) if aloud else None,
        )
        if _is_finished(rendezvous, run):
            return EXIT_COMPLETE
        uploader = _start_uploader(options, run, node, declared, scratch)
        stack.callback(uploader.stop, STOP_S)
        handler = ElasticRendezvous(
            rendezvous,
            host,
            run_id=options.rdzv_id or run.local.name,
            interrupted=lambda: agent.wants_to_leave,
        )
        agent = NodeAgent(
            WorkerSpec(
                role="default",
                local_world_size=nproc,
                rdzv_handler=handler,
                entrypoint=options.recipe,
                max_restarts=options.max_restarts,
            ),
            DefaultLogsSpecs(log_dir=str(scratch)),  # by itself it would leave a folder behind at every start
            settings=_settings(options, run, node, scratch, uploader, uses_library=declared is not None),
            rendezvous=rendezvous,
            uploader=uploader,
            console=console,
            log=log,
            clock=clock,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, agent.request_leave)
        console.start()
        stack.callback(console.stop)
        stack.callback(rendezvous.stop)
        agent.run()
        uploader.stop(STOP_S)
        console.stop()
        return farewell(agent, run, log)


def _policy(options: Options, declared: Identity | None) -> Policy:
    return Policy(
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        last_call_s=options.last_call_s,
        timeout_s=options.rdzv_timeout_s,
        max_workers=declared.shards if declared is not None else None,
    )


def _settings(
    options: Options, run: RunDir, node: str, scratch: Path, uploader: UploaderProcess, *, uses_library: bool
) -> Settings:
    return Settings(
        run=run,
        node=node,
        recipe=options.recipe,
        arguments=options.recipe_args,
        max_restarts=options.max_restarts,
        grace_s=options.grace_s,
        save_every=str(options.save_every),
        faults=options.faults,
        uses_library=uses_library,
        errors=scratch / "errors",
        uploader_socket=uploader.socket_path,
    )


def _is_finished(rendezvous: Rendezvous, run: RunDir) -> bool:
    """Whether the run is complete already; a failed or interrupted one is opened again."""
    group = rendezvous.reopen()
    if group.ended is None:
        return False
    print(
        f"the run in {run.url} is finished; elastic-train report {run.url} shows it, --fresh would set it aside and start anew"
    )
    return True


def _start_uploader(
    options: Options, run: RunDir, node: str, declared: Identity | None, scratch: Path
) -> UploaderProcess:
    uploader = UploaderProcess.start(
        UploaderConfig(
            checkpoints_url=run.checkpoints_url,
            run_id="" if declared is None else declared.run_id,
            node=node,
            keep=options.keep,
            every=None,
            save_deadline_s=SAVE_DEADLINE_S,
            socket_path=str(scratch / "uploader"),
            events_path=str(run.events / f"{node}-uploader.jsonl"),
            fence_path=str(_meeting_place(options, run) / "generation"),
            faults=options.faults,
            faults_path=str(run.faults),
        )
    )
    uploader.wait_ready()
    return uploader


def _meeting_place(options: Options, run: RunDir) -> Path:
    """The folder of the rendezvous; the newest generation, which fences the savers of older ones, is told there and nowhere else."""
    return run.rendezvous if options.rdzv_endpoint is None else Path(options.rdzv_endpoint).absolute()
