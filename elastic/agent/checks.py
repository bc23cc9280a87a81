"""What is wrong with a command and can be seen without torch is said before anything is started for it.

What the recipe declares, and what the run directory holds, is checked later: the first needs a process, the second the first.
"""

import os

from elastic.agent.open_rendezvous import meeting_of
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.faults import grammar, plan
from elastic.storage.remote import check_url
from elastic.system.control_page import MAX_WORKERS


def check_faults(options: Options, nproc: int | None, *, uses_library: bool = True) -> None:
    """nproc: None where it takes torch to know. Raises UsageError."""
    faults = grammar.parse(options.faults or "")
    plan.check_fits(faults, nodes=options.max_nodes, nproc=nproc, uses_library=uses_library)


def check(options: Options) -> None:
    """Raises UsageError; writes nothing."""
    if options.nproc_per_node != "auto" and options.nproc_per_node > MAX_WORKERS:
        raise UsageError(
            f"expected at most {MAX_WORKERS} workers a node, found --nproc-per-node {options.nproc_per_node}"
        )
    check_faults(options, None if options.nproc_per_node == "auto" else options.nproc_per_node)
    run = RunDir.parse(options.run_dir)
    meeting = meeting_of(options, run)
    meeting.check(os.environ)
    if options.meets_in_objects:
        check_url(meeting.endpoint)
    if run.local.exists() and not run.local.is_dir():
        raise UsageError(f"expected a run directory at {run.local}, found a file; take another --run-dir")
    parent = next(folder for folder in (run.local, *run.local.parents) if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(
            f"expected to write to {parent}, found it read-only; take another --run-dir or change its mode"
        )
    check_url(run.checkpoints_url)  # an unknown protocol or a missing extra is said here
