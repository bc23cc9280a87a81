"""The last thing an agent prints says how the run stands and what to do; its exit code says the same to a program.

The interrupted code is given only where a checkpoint holds the last step that was trained.
"""

import sys

from elastic.agent.agent import NodeAgent
from elastic.checkpoint.record import CommitRecord
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOTHING_LOADS
from elastic.events import RunFailed, RunFinished, RunInterrupted
from elastic.observe.log import EventLog, read_events
from elastic.system.untrusted import printable


def report_exit(agent: NodeAgent, run: RunDir, log: EventLog) -> int:
    """Record the end, print it, and return the exit code."""
    newest = agent.newest_checkpoint()
    safe = 0 if newest is None else newest.step
    match agent.exit_code:
        case code if code == EXIT_COMPLETE:
            return _complete(agent, run, log, newest)
        case code if code == EXIT_INTERRUPTED:
            return _interrupted(agent, run, log, safe)
        case code:
            log.record(RunFailed(exit_code=code, reason=agent.verdict))
            _print_failure(agent, run, safe)
            return code


def _complete(agent: NodeAgent, run: RunDir, log: EventLog, last: CommitRecord | None) -> int:
    started = next((e for e in reversed(read_events(run.events)) if e["event"] == "run_started"), None)
    if started is None or last is None:
        print(f"complete; logs are in {run.local / 'logs'}")
        return EXIT_COMPLETE
    if agent.is_first:
        log.record(RunFinished(steps=last.step, epochs=int(started["epochs"]), digest=last.digest))
    print(
        f"complete: {last.step} steps, digest {last.digest[:16]}; elastic-train report {run.url} shows how it went"
    )
    return EXIT_COMPLETE


def _interrupted(agent: NodeAgent, run: RunDir, log: EventLog, safe: int) -> int:
    log.record(RunInterrupted(step=safe))
    if not agent.uses_library and agent.last_step == 0 and agent.cut_short:
        print(
            f"interrupted ({agent.verdict}): the script was stopped, and whatever it saved is its own",
            file=sys.stderr,
        )
        return EXIT_FAILED
    if agent.last_step > safe:
        print(
            f"interrupted ({agent.verdict}) after step {agent.last_step}, but step {safe} is the newest that is saved; "
            f"the same command resumes there and trains {agent.last_step - safe} steps again",
            file=sys.stderr,
        )
        return EXIT_FAILED
    print(
        f"interrupted ({agent.verdict}); step {safe} is saved in {run.url}: the same command resumes",
        file=sys.stderr,
    )
    return EXIT_INTERRUPTED


def _print_failure(agent: NodeAgent, run: RunDir, safe: int) -> None:
    failure = agent.failure
    if agent.exit_code == EXIT_NOTHING_LOADS:
        print(f"elastic-train verify {run.url} lists the damage", file=sys.stderr)
    print(
        f"training failed: {printable(agent.verdict)}. Step {safe} is the newest that is saved; logs are in {run.local / 'logs'}",
        file=sys.stderr,
    )
    if failure is not None:
        # It may come from another node.
        print(printable(f"first failing worker: rank {failure.rank} on {failure.node}"), file=sys.stderr)
        print(printable(failure.traceback.rstrip() or failure.message), file=sys.stderr)
