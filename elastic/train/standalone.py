"""Without an agent (plain python, or torchrun) a recipe runs all the same.

Rank 0 owns the uploader, and each worker its own control page. SIGTERM and the first Ctrl-C ask for
a drain. Nothing but torchrun restarts workers here, and no snapshot survives them.
"""

import os
import shutil
import signal
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path

from elastic.checkpoint.catalog import list_commits
from elastic.config.environment import AgentLink, Launch
from elastic.config.identity import Identity
from elastic.config.run_dir import RunDir
from elastic.observe.log_shipper import LogShipper
from elastic.storage.remote import open_store
from elastic.system import forked_child
from elastic.system.clock import SystemClock
from elastic.system.control_page import ControlPage
from elastic.train.process_groups import ProcessGroups
from elastic.uploader.client import UploaderProcess
from elastic.uploader.protocol import UploaderConfig


def run_without_agent(launch: Launch, ours: Identity) -> RunDir:
    return RunDir.parse(launch.run_dir or f"runs/{Path(ours.recipe).stem}")


def link_without_agent(launch: Launch, groups: ProcessGroups, ours: Identity) -> AgentLink:
    """The link that an agent would have passed, made of defaults and ELASTIC_RUN_DIR."""
    run = run_without_agent(launch, ours)
    page = ControlPage.create()
    generation, socket_path = 0, ""
    if groups.rank == 0:
        records, _ = list_commits(open_store(run.checkpoints_url), SystemClock())
        generation = 1 + max((record.generation for record in records), default=0)
        socket_path = _own_uploader(run, ours)
    forked_child.handle_signal(signal.SIGINT, lambda _number, _frame: _ask_drain(page))
    return AgentLink(
        pid=os.getpid(),
        node=socket.gethostname(),
        run_dir=run.url,
        generation=groups.from_rank0(generation),
        control_page=page.path,
        uploader=socket_path,
        save_every="auto",
        snapshot_every="off",
        audit="auto",
        memory="",
        failures=0,
        divergence=None,
        error_folder="",
        faults=None,
        parent=ours.parent,
    )


def _ask_drain(page: ControlPage) -> None:
    if page.drain:
        raise KeyboardInterrupt
    page.drain = True
    print("stopping after this step; once more to stop at once", file=sys.stderr)


def _own_uploader(run: RunDir, ours: Identity) -> str:
    node = socket.gethostname()
    if run.is_remote:
        log_shipper = LogShipper(run, node, is_first=lambda: True, is_new=False, print_line=print)
        forked_child.at_own_exit(log_shipper.close)
        log_shipper.start()
    scratch = Path(tempfile.mkdtemp(prefix="elastic-"))
    config = UploaderConfig.of(run, scratch, run_id=ours.run_id, node=node, keep=3)
    uploader = UploaderProcess.start(config)
    forked_child.at_own_exit(partial(shutil.rmtree, scratch, ignore_errors=True))
    forked_child.at_own_exit(uploader.stop)
    os.register_at_fork(after_in_child=uploader.release)
    uploader.wait_ready()
    return uploader.socket_path
