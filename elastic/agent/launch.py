"""From a command line to an exit code: everything is checked before anything is written, and everything that was started is ended.

It does not train and does not decide: it puts one node's parts together around the agent.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from elastic.agent import preflight
from elastic.agent.agent import NodeAgent
from elastic.agent.exit_report import report_exit
from elastic.agent.hangs.hang_detector import HangDetector
from elastic.agent.open_rendezvous import (
    meeting_of,
    newest_generation,
    open_backend,
    set_aside,
    show_generation,
)
from elastic.agent.preemption_notice import open_notices
from elastic.agent.settings import Settings
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.agent.workers.spawner import Spawner
from elastic.config.durations import Every
from elastic.config.identity import Identity
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, UsageError
from elastic.observe.console import ConsoleFollower, open_screen
from elastic.observe.log import EventLog
from elastic.observe.upload import LogUploader
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.backends.select import RendezvousConfig, serve_until_read
from elastic.rendezvous.group import Node
from elastic.rendezvous.probes import Probes
from elastic.rendezvous.rendezvous import Rendezvous
from elastic.rendezvous.torch_handler import ElasticRendezvous, EndpointHost
from elastic.rendezvous.transitions import GroupPolicy
from elastic.system.addresses import new_node_id, node_address
from elastic.system.clock import Clock, SystemClock
from elastic.uploader.client import STOP_S, UploaderProcess
from elastic.uploader.protocol import UploaderConfig

CALLS_PER_KEEP_ALIVE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """The part of the run that is this node's, checked. declared: None for a script that does not use the library. is_new: the run directory holds no run yet."""

    options: Options
    run: RunDir
    meeting: RendezvousConfig
    nproc: int
    declared: Identity | None
    is_new: bool
    node: str
    clock: Clock

    @property
    def run_id(self) -> str:
        return "" if self.declared is None else self.declared.run_id


def launch(options: Options, spawner: Spawner) -> int:
    """Run this node's part of the run; returns the exit code. Raises UsageError before anything was written.

    What can be checked without torch was checked before. spawner: begins to import before this module does.
    """
    recipe, clock = Path(options.recipe), SystemClock()
    run = RunDir.parse(options.run_dir)
    nproc = _nproc(options)
    uses_library = preflight.uses_library(recipe)
    preflight.check_faults(options, nproc, uses_library=uses_library)
    declared = (
        preflight.declared_identity(recipe, options.recipe_args, spawner.start) if uses_library else None
    )
    is_new = options.fresh if declared is None else preflight.check_run_dir(options, declared, run, nproc)
    meeting = meeting_of(options, run)
    backend = None if meeting.kind == "dir" else open_backend(meeting, options)
    if options.fresh:
        set_aside(run, meeting, backend, keep_alive_s=options.keep_alive_s)
    floor = 0
    if backend is None:  # a folder, which is made only now that the run directory stands
        backend = meeting.open(os.environ)
    elif backend.read() is None:
        floor = newest_generation(run, clock)
    here = _Here(
        options=options,
        run=run,
        meeting=meeting,
        nproc=nproc,
        declared=declared,
        is_new=is_new,
        node=new_node_id(),
        clock=clock,
    )
    return _run(here, backend, floor, spawner)


def _nproc(options: Options) -> int:
    return (torch.cuda.device_count() or 1) if options.nproc_per_node == "auto" else options.nproc_per_node


def _run(here: _Here, backend: Backend, floor: int, spawner: Spawner) -> int:
    """floor: generations are counted from there where the backend knows of none."""
    options, run, node, clock = here.options, here.run, here.node, here.clock
    log = EventLog(run.events / f"{node}-agent.jsonl", node=node, clock=clock)
    with ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="elastic-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        console = ConsoleFollower(run, node, open_screen(sys.stdout), clock)
        address = options.local_addr or node_address(os.environ)
        host = EndpointHost(address)
        calls = stack.enter_context(_calling(node, address, options.keep_alive_s))
        rendezvous = _rendezvous(here, backend, floor, host, calls, console)
        if _is_finished(rendezvous, run, is_new=here.is_new):
            return EXIT_COMPLETE
        mirror = show_generation(here.meeting, backend, scratch / "generation")
        if mirror is not None:
            stack.callback(mirror.close)
        uploader = _start_uploader(here, scratch)
        stack.callback(uploader.stop)
        shutdown = ShutdownRequest(options.grace_s, clock)
        agent = NodeAgent(
            _worker_spec(here, rendezvous, host, shutdown),
            DefaultLogsSpecs(log_dir=str(scratch)),  # by itself it would leave a folder behind at every start
            settings=_settings(here, scratch, uploader),
            rendezvous=rendezvous,
            leaving=shutdown,
            spawner=spawner,
            uploader=uploader,
            console=console,
            log=log,
            clock=clock,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, shutdown.on_signal)
        stack.enter_context(_logs_uploaded(here, agent, console))
        console.start()
        spawner.report = console.print_line
        stack.callback(console.stop)
        stack.callback(rendezvous.stop)
        stack.enter_context(
            open_notices(
                options.notice_file, options.notice_command, shutdown.request, clock, console.print_line
            )
        )
        agent.run()
        uploader.stop(shutdown.limit_s(STOP_S))
        rendezvous.stop()
        if agent.exit_code != EXIT_INTERRUPTED:
            serve_until_read(backend, node, clock)
        console.stop()
        return report_exit(agent, run, log)


def _rendezvous(
    here: _Here, backend: Backend, floor: int, host: EndpointHost, calls: Probes, console: ConsoleFollower
) -> Rendezvous:
    options, declared = here.options, here.declared
    rendezvous = Rendezvous(
        backend,
        Node(id=here.node, address=host.address, nproc=here.nproc, port=calls.port),
        GroupPolicy(
            min_nodes=options.min_nodes,
            max_nodes=options.max_nodes,
            last_call_s=options.last_call_s,
            timeout_s=options.rdzv_timeout_s,
            max_workers=declared.shards if declared is not None else None,
        ),
        keep_alive_s=options.keep_alive_s,
        clock=here.clock,
        open_endpoint=host.open,
        notify=lambda reason, aloud: console.print_line(reason) if aloud else None,
        min_generation=floor,
        probes=calls,
    )
    if options.fresh and here.meeting.kind != "dir":
        rendezvous.reset()
    return rendezvous


def _worker_spec(
    here: _Here, rendezvous: Rendezvous, host: EndpointHost, shutdown: ShutdownRequest
) -> WorkerSpec:
    return WorkerSpec(
        role="default",
        local_world_size=here.nproc,
        rdzv_handler=ElasticRendezvous(
            rendezvous,
            host,
            run_id=here.options.rdzv_id or here.run.local.name,
            interrupted=lambda: shutdown.is_requested,
        ),
        entrypoint=here.options.recipe,
        max_restarts=here.options.max_restarts,
    )


@contextmanager
def _calling(node: str, address: str, keep_alive_s: float) -> Iterator[Probes]:
    try:
        calls = Probes(node, address, keep_alive_s / CALLS_PER_KEEP_ALIVE)
    except OSError as error:
        raise UsageError(
            f"expected an address of this machine that the other nodes reach, found {address!r} ({error}); correct --local-addr"
        ) from error
    try:
        yield calls
    finally:
        calls.close()


@contextmanager
def _logs_uploaded(here: _Here, agent: NodeAgent, console: ConsoleFollower) -> Iterator[None]:
    """What the node writes line by line reaches the run directory where that is no folder, the agent's last words too."""
    if not here.run.is_remote:
        yield
        return
    log_uploader = LogUploader(
        here.run,
        here.node,
        is_first=lambda: agent.is_first,
        is_new=here.is_new,
        clock=here.clock,
        report=console.print_line,
    )
    log_uploader.start()
    try:
        yield
    finally:
        log_uploader.close()


def _settings(here: _Here, scratch: Path, uploader: UploaderProcess) -> Settings:
    options, uses_library = here.options, here.declared is not None
    return Settings(
        run=here.run,
        run_id=here.run_id,
        node=here.node,
        recipe=options.recipe,
        arguments=options.recipe_args,
        max_restarts=options.max_restarts,
        keep_alive_s=options.keep_alive_s,
        save_every=str(options.save_every),
        snapshot_every=str(options.snapshot_every),
        faults=options.faults,
        uses_library=uses_library,
        errors=scratch / "errors",
        uploader_socket=uploader.socket_path,
        silences=_silences(options.hang_timeout) if uses_library else None,
    )


def _silences(timeout: Every) -> HangDetector | None:
    return None if timeout.kind == "off" else HangDetector(fixed_s=timeout.value or None)


def _is_finished(rendezvous: Rendezvous, run: RunDir, *, is_new: bool) -> bool:
    """Whether the run is complete already; a failed or interrupted one is opened again."""
    group = rendezvous.reopen(is_new=is_new)
    if group.ended is None:
        return False
    print(
        f"the run in {run.url} is finished; elastic-train report {run.url} shows it, --fresh would set it aside and start anew"
    )
    return True


def _start_uploader(here: _Here, scratch: Path) -> UploaderProcess:
    options, run, node = here.options, here.run, here.node
    config = UploaderConfig.of(run, scratch, run_id=here.run_id, node=node, keep=options.keep)
    uploader = UploaderProcess.start(
        replace(config, fence=here.meeting.fence(scratch / "generation"), faults=options.faults)
    )
    uploader.wait_ready()
    return uploader
