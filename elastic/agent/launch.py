"""The checks of preflight.py come before the first write, and everything that is started is ended.

This is the way from a command line to an exit code. It neither trains nor decides: it puts the
parts of one node together around its agent.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial

from elastic.agent import preflight, run_directory
from elastic.agent.agent import NodeAgent
from elastic.agent.exit_report import check_finished, finished_text, is_finished, report_exit
from elastic.agent.final_checkpoint import finish_saves, offer_newest
from elastic.agent.parts import AgentParts, Monitor, Settings
from elastic.agent.preemption import open_notices
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.agent.worker_process import Spawner
from elastic.checkpoint.provenance import claim_local_copies, newest_generation
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, GroupEnded
from elastic.observe.console import STOP_WITHIN_S, ConsoleFollower
from elastic.observe.log_shipper import CLOSE_WITHIN_S, LogShipper, upload_left_behind
from elastic.rendezvous import meeting_place
from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.backends.select import serve_until_read
from elastic.rendezvous.group import Group
from elastic.rendezvous.reachability import Probes
from elastic.rendezvous.store_socket import StoreSockets
from elastic.system import stop_signals
from elastic.system.addresses import new_node_id
from elastic.system.clock import SystemClock
from elastic.system.command_end import print_if_read
from elastic.system.files import scratch_folder
from elastic.system.leave_deadline import LeavePage, Share
from elastic.system.untrusted import printable
from elastic.uploader.client import UploaderProcess
from elastic.uploader.protocol import UploaderConfig

PROBES_PER_KEEP_ALIVE = 8
_CLOCK = SystemClock()


def launch(options: Options, spawner: Spawner, monitors: Sequence[Monitor], page: LeavePage) -> int:
    """Run this node's part of the run; returns the exit code.

    The caller has checked what it takes no torch to check. spawner: its fork server imports
    meanwhile. monitors: watch the agent. page: of the supervisor. Raises UsageError; after `claim`
    the directory is this run's. Raises RendezvousTimeout when the backend does not answer within
    --rdzv-timeout.
    """
    run = RunDir.parse(options.run_dir)
    nproc = (spawner.count_gpus() or 1) if options.nproc_per_node == "auto" else options.nproc_per_node
    declared, is_new = preflight.check_recipe(options, run, nproc, spawner)
    # Also those of a run that is set aside: a process of it that wakes up late shares no file.
    newest = newest_generation(run, _CLOCK)
    if options.fresh:
        run_directory.set_aside(run, _CLOCK, partial(print, flush=True))
    uid = run_directory.claim(run, declared, _CLOCK)
    claim_local_copies(run, uid, _CLOCK)
    met = meeting_place.newest(run, _CLOCK)
    with scratch_folder() as scratch:
        settings = Settings(
            options=options,
            run=run,
            rendezvous=run_directory.rendezvous_config(options, run, None if met is None else met[1]),
            node=new_node_id(),
            nproc=nproc,
            declared=declared,
            uid=uid,
            is_new=is_new,
            scratch=scratch,
        )
        try:
            return _run(settings, newest, spawner, monitors, ShutdownRequest(page, _CLOCK))
        except GroupEnded:  # the place to meet does not answer any more
            return _finished(settings)


def _run(
    settings: Settings, newest: int, spawner: Spawner, monitors: Sequence[Monitor], shutdown: ShutdownRequest
) -> int:
    """Start the parts, run the agent, stop the parts in the opposite order.

    newest: the last generation before a run was set aside.
    """
    options, run, backend = settings.options, settings.run, run_directory.open_backend(settings)
    console = ConsoleFollower(run, settings.node, sys.stdout, _CLOCK)
    with ExitStack() as stack:
        sockets = StoreSockets(preflight.address_of(options))
        every_s = options.keep_alive_s / PROBES_PER_KEEP_ALIVE
        probes = stack.enter_context(closing(Probes(settings.node, sockets.address, every_s, _CLOCK)))
        rendezvous = run_directory.open_rendezvous(
            settings, backend, sockets, probes, newest, console.print_line
        )
        ended = run_directory.answer_of(partial(rendezvous.reopen, is_new=settings.is_new), settings)
        if ended is not None or is_finished(settings):
            check_finished(settings, rendezvous.committed_step)
            return _finished(settings)
        place = run_directory.take_place(settings, rendezvous)
        stack.callback(shutdown.tidy, partial(run_directory.release_place, run, rendezvous, place))
        uploader = _start_uploader(settings, backend)
        stack.callback(shutdown.tidy, uploader.stop)
        parts = AgentParts(settings, rendezvous, shutdown, spawner, uploader=uploader, console=console)
        agent = NodeAgent(parts, sockets)
        _handle_signals(options, shutdown)
        if run.is_remote:
            # Stopped after the exit report, which it uploads too.
            stack.callback(_end_uploads, _start_log_shipper(parts), shutdown)
        console.start()
        stack.callback(console.stop)
        stack.callback(shutdown.tidy, rendezvous.stop)
        stack.enter_context(open_notices(options, shutdown.request, console.print_line))
        for each in monitors:
            each.start(parts)
        agent.run()
        parts.health.end()
        if agent.end.exit_code != EXIT_INTERRUPTED:
            shutdown.decided(agent.end.exit_code)
        if agent.end.exit_code not in (EXIT_COMPLETE, EXIT_INTERRUPTED):
            # A state that all ranks agreed on is right, whatever a later step ran into. The newest
            # one may be in this memory alone, which ends with the agent.
            parts.memory.keep_compared()
            offer_newest(parts)
        finish_saves(parts)
        shutdown.tidy(rendezvous.stop)
        if agent.end.exit_code != EXIT_INTERRUPTED:
            shutdown.tidy(partial(serve_until_read, backend, settings.node, _CLOCK))
        console.stop(shutdown.left_s(Share.REPORT, STOP_WITHIN_S))
        exit_code = report_exit(agent, parts)
        for each in monitors:  # once the files hold the end
            shutdown.tidy(each.stop)
        return exit_code


def _handle_signals(options: Options, shutdown: ShutdownRequest) -> None:
    for number in (*stop_signals.END, *options.drain_signals):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it ignore SIGHUP
            signal.signal(number, shutdown.on_signal)


def _end_uploads(log_shipper: LogShipper, shutdown: ShutdownRequest) -> None:
    _print_problem(log_shipper.close(shutdown.left_s(Share.REPORT, CLOSE_WITHIN_S)))


def _finished(settings: Settings) -> int:
    if settings.run.is_remote:
        _print_problem(upload_left_behind(settings.run))
    print(printable(finished_text(settings)))
    return EXIT_COMPLETE


def _print_problem(text: str) -> None:
    if text:
        print_if_read(printable(text), file=sys.stderr)


def _start_uploader(settings: Settings, backend: Backend) -> UploaderProcess:
    config = UploaderConfig(
        run_url=settings.run.url,
        scratch=str(settings.scratch),
        run_id=settings.run_id,
        node=settings.node,
        keep=settings.options.keep,
        uid=settings.uid,
        faults=settings.options.faults,
    )
    return UploaderProcess(config, shown=_shown_generation(settings, backend))


def _shown_generation(settings: Settings, backend: Backend) -> Callable[[], int]:
    """A call that asks the rendezvous now for the newest generation."""
    reader = backend
    if settings.rendezvous.kind == "objects":
        from elastic.rendezvous.backends.object_store import ObjectStoreBackend

        # Without the pauses between the polls of agents.
        reader = ObjectStoreBackend(settings.rendezvous.endpoint, state_s=0.0)

    def newest() -> int:
        found = reader.read()
        return 0 if found is None else Group.parse(found[1]).generation

    return newest


def _start_log_shipper(parts: AgentParts) -> LogShipper:
    run, node, say = parts.settings.run, parts.settings.node, parts.console.print_line
    shipper = LogShipper(run, node, is_first=lambda: parts.group.is_first, print_line=say)
    shipper.start()
    return shipper
