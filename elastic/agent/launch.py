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

from elastic import identity
from elastic.agent import preflight
from elastic.agent.agent import NodeAgent
from elastic.agent.closing import farewell
from elastic.agent.hangs import Silences
from elastic.agent.notice import open_notices
from elastic.agent.nursery import Nursery
from elastic.agent.settings import Settings
from elastic.checkpoint.fsspec_store import open_store
from elastic.checkpoint.handoff import UploaderProcess
from elastic.checkpoint.store import read_small
from elastic.checkpoint.wire import UploaderConfig
from elastic.clock import SystemClock
from elastic.errors import EXIT_COMPLETE, StoreFailed, UsageError
from elastic.identity import Identity
from elastic.observe.console import Tail, open_screen
from elastic.observe.log import EventLog, read_events
from elastic.observe.status import GOODBYES
from elastic.options import HangTimeout, Options
from elastic.rendezvous.address import new_node_id, node_address
from elastic.rendezvous.core import Policy
from elastic.rendezvous.directory import DirectoryBackend
from elastic.rendezvous.group import Rendezvous
from elastic.rendezvous.membership import Node
from elastic.rendezvous.torch_handler import ElasticRendezvous, EndpointHost
from elastic.run_dir import RunDir

SAVE_DEADLINE_S = 600.0
STOP_S = 30.0


def launch(options: Options, nursery: Nursery) -> int:
    """Run this node's part of the run; returns the exit code. Raises UsageError before anything was written.

    What can be checked without torch was checked before. nursery: begins to import before this module does.
    """
    recipe = Path(options.recipe)
    run = RunDir.parse(options.run_dir)
    nproc = _nproc(options)
    uses_library = preflight.uses_library(recipe)
    declared = preflight.ask(recipe, options.recipe_args, nursery.start) if uses_library else None
    if declared is not None:
        _check_declared(options, declared, run, nproc)
    if options.fresh:
        _set_aside(run, _meeting_place(options, run))
    return _run(options, run, nproc, declared, nursery)


def _nproc(options: Options) -> int:
    return (torch.cuda.device_count() or 1) if options.nproc_per_node == "auto" else options.nproc_per_node


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


def _run(options: Options, run: RunDir, nproc: int, declared: Identity | None, nursery: Nursery) -> int:
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
            nursery=nursery,
            uploader=uploader,
            console=console,
            log=log,
            clock=clock,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, agent.request_leave)
        console.start()
        nursery.say = console.say
        stack.callback(console.stop)
        stack.callback(rendezvous.stop)
        stack.enter_context(
            open_notices(options.notice_file, options.notice_command, agent.leave_because, clock, console.say)
        )
        agent.run()
        uploader.stop(agent.patience_s(STOP_S))
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
        snapshot_every=str(options.snapshot_every),
        faults=options.faults,
        uses_library=uses_library,
        errors=scratch / "errors",
        uploader_socket=uploader.socket_path,
        silences=_silences(options.hang_timeout) if uses_library else None,
    )


def _silences(timeout: HangTimeout) -> Silences | None:
    return None if timeout.kind == "off" else Silences(fixed_s=timeout.seconds)


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
