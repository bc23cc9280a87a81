"""The checks of preflight.py come before the first write, and everything that is started is ended.

This is the way from a command line to an exit code. It neither trains nor decides: it puts the
parts of one node together around its agent.
"""

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from elastic.agent import preflight
from elastic.agent.agent import NodeAgent
from elastic.agent.claim_run_dir import claim, claim_again
from elastic.agent.exit_report import report_exit
from elastic.agent.fault_injection import NodeFaults
from elastic.agent.final_checkpoint import CommitWatch, FinalCheckpoint
from elastic.agent.finished_run import check_finished, finished_text, has_trained_nothing, is_complete
from elastic.agent.group_client import GroupClient
from elastic.agent.hang_detector import HangDetector
from elastic.agent.monitor import Monitor
from elastic.agent.open_rendezvous import answer_of, open_backend, rendezvous_config, take_place
from elastic.agent.parts import AgentHealth, AgentParts
from elastic.agent.preemption import open_notices
from elastic.agent.run_dir_watch import RunDirWatch
from elastic.agent.set_aside import set_aside
from elastic.agent.settings import Settings
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.agent.snapshot_memory import SLOTS, SLOTS_WITHOUT_SNAPSHOTS, SnapshotMemory
from elastic.agent.spawner import Spawner
from elastic.agent.store_socket import StoreSockets
from elastic.agent.watchdog import Watchdog
from elastic.checkpoint.newest_generation import newest_generation, newest_generation_seen
from elastic.config import environment
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, ElasticError, GroupEnded
from elastic.events import NodeScheduled
from elastic.faults.inject import Claims
from elastic.faults.plan import parse
from elastic.observe.console import STOP_WITHIN_S, ConsoleFollower, open_screen
from elastic.observe.local_copies import claim_local_copies
from elastic.observe.log import EventLog
from elastic.observe.log_shipper import CLOSE_WITHIN_S, LogShipper, upload_left_behind
from elastic.rendezvous import meeting_place
from elastic.rendezvous.backends.backend import Backend, PublishesGeneration
from elastic.rendezvous.backends.select import serve_until_read
from elastic.rendezvous.group import Group, Node
from elastic.rendezvous.meeting_place import Place
from elastic.rendezvous.membership import GroupPolicy
from elastic.rendezvous.probes import Probes
from elastic.rendezvous.rendezvous import Rendezvous
from elastic.storage.remote import open_store
from elastic.system import stop_signals
from elastic.system.addresses import new_node_id
from elastic.system.clock import SystemClock
from elastic.system.control_page import ControlPage
from elastic.system.leave_deadline import Share
from elastic.system.leave_page import LeavePage
from elastic.system.output import print_if_read
from elastic.system.scratch import scratch_folder
from elastic.system.untrusted import printable
from elastic.uploader.client import UploaderProcess
from elastic.uploader.protocol import UploaderConfig

PROBES_PER_KEEP_ALIVE = 8
_CLOCK = SystemClock()


def launch(options: Options, spawner: Spawner, monitor: Monitor, page: LeavePage) -> int:
    """Run this node's part of the run; returns the exit code.

    The caller has checked what it takes no torch to check. spawner: its fork server imports
    meanwhile. monitor: watches the agent. page: of the supervisor.
    Raises UsageError, before anything is written unless the uploader finds the mistake: it starts
    last. Raises RendezvousTimeout when the backend does not answer within --rdzv-timeout.
    """
    run = RunDir.parse(options.run_dir)
    nproc = (spawner.count_gpus() or 1) if options.nproc_per_node == "auto" else options.nproc_per_node
    declared, is_new = None, options.fresh
    imports_library = preflight.imports_library(Path(options.recipe))
    preflight.check_faults(options, nproc, is_plain=not imports_library)
    if imports_library:
        start, must_spawn = spawner.start, spawner.fork_no_more
        declared = preflight.declared_identity(Path(options.recipe), options.recipe_args, start, must_spawn)
        declared, is_new = preflight.check_run_dir(options, declared, run, nproc)
    else:
        preflight.check_plain(options)
    # Also those of a run that is set aside: a process of it that wakes up late shares no file.
    newest = newest_generation(run, _CLOCK)
    if options.fresh:
        set_aside(run, _CLOCK, partial(print, flush=True))
    uid = claim(run, declared, _CLOCK)
    claim_local_copies(run, uid)
    met = meeting_place.newest(run, _CLOCK)
    config = rendezvous_config(options, run, None if met is None else met[1])
    with scratch_folder() as scratch:
        settings = Settings(
            options=options,
            run=run,
            rendezvous=config,
            node=new_node_id(),
            nproc=nproc,
            declared=declared,
            uid=uid,
            is_new=is_new,
            scratch=scratch,
        )
        try:
            backend = open_backend(settings)
            return _run(settings, backend, newest, spawner, monitor, ShutdownRequest(page, _CLOCK))
        except GroupEnded:  # the place to meet does not answer any more
            return _finished(settings, monitor)


def _run(
    settings: Settings,
    backend: Backend,
    newest: int,
    spawner: Spawner,
    monitor: Monitor,
    shutdown: ShutdownRequest,
) -> int:
    """Start the parts, run the agent, stop the parts in the opposite order.

    newest: the last generation before a run was set aside.
    """
    options, run = settings.options, settings.run
    console = ConsoleFollower(run, settings.node, open_screen(sys.stdout), _CLOCK)
    with ExitStack() as stack:
        host = StoreSockets(preflight.address_of(options))
        every_s = options.keep_alive_s / PROBES_PER_KEEP_ALIVE
        probes = stack.enter_context(closing(Probes(settings.node, host.address, every_s, _CLOCK)))
        rendezvous = _rendezvous(settings, backend, newest, host, probes, console)
        is_new = settings.is_new or has_trained_nothing(settings)
        if answer_of(partial(rendezvous.reopen, is_new=is_new), settings) is not None:
            check_finished(settings, rendezvous.committed_step)
            return _finished(settings, monitor)
        place = take_place(settings, rendezvous)
        stack.callback(lambda: shutdown.tidy(lambda: _release(settings.run, rendezvous, place)))
        uploader = _start_uploader(settings, backend)
        uploader.wait_ready()
        stack.callback(shutdown.tidy, uploader.stop)
        parts = _parts(settings, rendezvous, shutdown, spawner, place, uploader=uploader, console=console)
        agent = NodeAgent(parts, host)
        _handle_signals(options, shutdown)
        if run.is_remote:
            # Stopped after the exit report, which it uploads too.
            log_shipper = _start_log_shipper(parts)
            stack.callback(lambda: _print_problem(_end_uploads(log_shipper, shutdown)))
        console.start()
        spawner.report = console.print_line
        spawner.interrupted = lambda: shutdown.is_over(agent.workers_share)
        stack.callback(console.stop)
        stack.callback(shutdown.tidy, rendezvous.stop)
        stack.enter_context(
            open_notices(options, environment.variables(), shutdown.request, console.print_line, _CLOCK)
        )
        _watched(agent, parts, monitor)
        if agent.end.exit_code not in (EXIT_COMPLETE, EXIT_INTERRUPTED):
            # A state that all ranks agreed on is right, whatever a later step ran into. The newest
            # one may be in this memory alone, which ends with the agent.
            parts.memory.keep_compared()
            parts.final_checkpoint.offer_newest()
        parts.final_checkpoint.finish_saves(uploader)
        shutdown.tidy(rendezvous.stop)
        if agent.end.exit_code != EXIT_INTERRUPTED:
            shutdown.tidy(partial(serve_until_read, backend, settings.node, _CLOCK))
        now_s = _CLOCK.monotonic()
        console.stop(shutdown.end_s(Share.REPORT, now_s, STOP_WITHIN_S) - now_s)
        exit_code = report_exit(agent, parts)
        shutdown.tidy(monitor.stop)  # once the files hold the end
        return exit_code


def _handle_signals(options: Options, shutdown: ShutdownRequest) -> None:
    for number in (*stop_signals.END, *options.drain_signals):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it ignore SIGHUP
            signal.signal(number, shutdown.on_signal)


def _end_uploads(log_shipper: LogShipper, shutdown: ShutdownRequest) -> str:
    with shutdown.task("the last events and metrics"):
        now_s = _CLOCK.monotonic()
        return log_shipper.close(shutdown.end_s(Share.REPORT, now_s, CLOSE_WITHIN_S) - now_s)


def _watched(agent: NodeAgent, parts: AgentParts, monitor: Monitor) -> None:
    monitor.start(parts)
    agent.run()
    parts.health.end()


def _finished(settings: Settings, monitor: Monitor) -> int:
    if settings.run.is_remote:
        _print_problem(upload_left_behind(settings.run))
    print(printable(finished_text(settings)))
    if said := monitor.catch_up(settings):
        print(printable(said))
    return EXIT_COMPLETE


def _print_problem(text: str) -> None:
    if text:
        print_if_read(printable(text), file=sys.stderr)


def _rendezvous(
    settings: Settings,
    backend: Backend,
    newest: int,
    host: StoreSockets,
    probes: Probes,
    console: ConsoleFollower,
) -> Rendezvous:
    options, declared = settings.options, settings.declared
    known = newest_generation(settings.run, _CLOCK)
    return Rendezvous(
        backend,
        Node(id=settings.node, address=host.address, nproc=settings.nproc, port=probes.port),
        GroupPolicy(
            min_nodes=options.min_nodes,
            max_nodes=options.max_nodes,
            last_call_s=options.last_call_s,
            timeout_s=options.rdzv_timeout_s,
            max_workers=declared.shards if declared is not None else None,
        ),
        keep_alive_s=options.keep_alive_s,
        clock=_CLOCK,
        open_endpoint=host.open,
        notify=lambda reason, aloud: console.print_line(reason) if aloud else None,
        min_generation=max(newest, known),
        has_begun=known > 0,
        probes=probes,
        run=settings.run_key,
        is_complete=partial(is_complete, settings),
        newest_generation=partial(newest_generation_seen, settings.run),
    )


def _start_uploader(settings: Settings, backend: Backend) -> UploaderProcess:
    config = UploaderConfig.of(
        settings.run,
        settings.scratch,
        run_id=settings.run_id,
        node=settings.node,
        keep=settings.options.keep,
        uid=settings.uid,
    )
    config = replace(config, faults=settings.options.faults)
    return UploaderProcess.start(config, shown=_shown_generation(settings, backend))


def _shown_generation(settings: Settings, backend: Backend) -> Callable[[], int]:
    """A call that asks the rendezvous now for the newest generation."""
    if isinstance(backend, PublishesGeneration):
        return backend.shown_generation
    from elastic.rendezvous.backends.object_store import NO_DELAY, ObjectStoreBackend

    # The number is in the group's newest version, read without the intervals at which agents poll.
    objects = ObjectStoreBackend(settings.rendezvous.endpoint, intervals=NO_DELAY)

    def newest() -> int:
        found = objects.read()
        return 0 if found is None else Group.parse(found[1]).generation

    return newest


def _release(run: RunDir, rendezvous: Rendezvous, place: Place) -> None:
    """The store of c10d ends with its host, after which no command can ask it who lives."""
    if place.kind == "c10d" and rendezvous.is_deserted:
        with suppress(ElasticError):
            meeting_place.release(run, place, _CLOCK)


def _claim_again(settings: Settings, place: Place) -> bool:
    """After the run directory was moved, make its name the run's again; False: it is another's."""
    if not claim_again(settings.run, settings.declared, settings.uid, _CLOCK):
        return False
    meeting_place.put(settings.run, 1, place)
    return True


def _parts(  # noqa: PLR0913 - what the agent is made of
    settings: Settings,
    rendezvous: Rendezvous,
    shutdown: ShutdownRequest,
    spawner: Spawner,
    place: Place,
    *,
    uploader: UploaderProcess,
    console: ConsoleFollower,
) -> AgentParts:
    options, run, report = settings.options, settings.run, console.print_line
    log = _open_log(settings)
    page = ControlPage.create()
    slots = SLOTS_WITHOUT_SNAPSHOTS if options.snapshot_every.kind == "off" else SLOTS
    memory = SnapshotMemory(page, slots, report)
    group = GroupClient(
        rendezvous, report, _CLOCK, shutdown, join_window_s=options.join_window_s, max_nodes=options.max_nodes
    )
    return AgentParts(
        settings=settings,
        group=group,
        commits=CommitWatch(uploader, shutdown.saved, group.report_commit),
        shutdown=shutdown,
        spawner=spawner,
        uploader=uploader,
        page=page,
        memory=memory,
        final_checkpoint=FinalCheckpoint(
            memory=memory,
            store=open_store(run.checkpoints_url),
            run_id=settings.run_id,
            uploader_socket=uploader.socket_path,
            shutdown=shutdown,
            clock=_CLOCK,
            report=report,
            log=log,
        ),
        watchdog=Watchdog(HangDetector(fixed_limit_s=options.hang_timeout.value or None), page, log, _CLOCK),
        faults=NodeFaults(parse(options.faults or ""), Claims(run.faults), log, _CLOCK),
        console=console,
        log=log,
        run_dir_watch=RunDirWatch(
            run, report, _CLOCK, reclaim=partial(_claim_again, settings, place), ban=shutdown.ban
        ),
        health=AgentHealth(_CLOCK),
        clock=_CLOCK,
    )


def _open_log(settings: Settings) -> EventLog:
    path = settings.run.events / f"{settings.node}-agent.jsonl"
    log = EventLog(path, node=settings.node, clock=_CLOCK)
    if (job := environment.SlurmJob.read()) is not None:
        log.record(NodeScheduled(scheduler="slurm", **asdict(job)))
    return log


def _start_log_shipper(parts: AgentParts) -> LogShipper:
    log_shipper = LogShipper(
        parts.settings.run,
        parts.settings.node,
        is_first=lambda: parts.group.is_first,
        is_new=parts.settings.is_new,
        print_line=parts.console.print_line,
    )
    log_shipper.start()
    return log_shipper
