"""The agent's last line says how the run stands and what to do; its exit code says the same.

A command on a run that has ended well trains nothing, and says how to go on from it. How many steps
the recipe asks for now is not known then: only its workers find out, and none is started.

The exit code is that for interrupted only where a checkpoint holds the last step that was trained,
or none was trained, or none on this node while others go on, or where a group that gave up lost it
with its nodes. A checkpoint of that step with another state does not count.
"""

import os
import sys
from contextlib import suppress
from functools import partial

from elastic import errors
from elastic.agent.agent import NodeAgent
from elastic.agent.final_checkpoint import newest_checkpoint
from elastic.agent.generation import is_own_exit
from elastic.agent.parts import AgentParts, Settings
from elastic.agent.run_directory import has_recorded_end, is_complete
from elastic.agent.shutdown_request import GivenUp
from elastic.checkpoint import stop_record
from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.record import CommitRecord, missing_text
from elastic.config.identity import new_run_from
from elastic.events import CheckpointCommitted, RunFailed, RunFinished, RunInterrupted, RunStarted
from elastic.observe import doubts, logged_event
from elastic.observe.log import read_events, read_rare
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock
from elastic.system.command_end import print_if_read
from elastic.system.leave_deadline import Share
from elastic.system.untrusted import printable


def report_exit(agent: NodeAgent, parts: AgentParts) -> int:
    """Record how the run ended on this node, print it, and return the exit code."""
    code, newest = agent.end.exit_code, None
    if parts.settings.imports_library:
        is_new = code == errors.EXIT_INTERRUPTED and agent.has_trained
        newest = newest_checkpoint(parts, step=agent.last_step, generation=agent.generation, is_new=is_new)
    if code == errors.EXIT_INTERRUPTED:
        # Where the storage does not say it, a commit that this node has seen counts.
        saved_step = parts.shutdown.saved_step if newest is None else newest.step
        code, text = _interrupted(agent, parts, saved_step)
        parts.shutdown.decided(code)
        # The reason may quote the group's state, which another node wrote.
        print_if_read(printable(text), file=sys.stderr)
        parts.log.record(RunInterrupted(step=saved_step, reason=agent.end.reason, gave_up=agent.gave_up))
        return code
    if code == errors.EXIT_COMPLETE:
        print_if_read(*map(printable, _complete(parts, newest)), file=sys.stdout)
    else:
        parts.log.record(RunFailed(exit_code=code, reason=agent.end.reason))
        print_if_read(*map(printable, _failed(agent, parts.settings, newest)), file=sys.stderr)
    return code


def _complete(parts: AgentParts, newest: CommitRecord | None) -> list[str]:
    """The last lines. The node of rank 0 writes down that the run is complete."""
    settings, run = parts.settings, parts.settings.run
    is_first = parts.group.is_first and not parts.group.is_fenced
    if not settings.imports_library:
        if is_first:
            parts.log.record(RunFinished(steps=0, epochs=0, digest=""))
        what = f"complete; elastic-train report {run.url} shows its restarts; logs are in {run.logs}"
        return [*parts.faults.unreached(0), what]
    try:
        events = read_events(run.events)
    except OSError as error:
        return [f"complete; its events cannot be read ({error}). Logs are in {run.logs}"]
    started = logged_event.last(events, RunStarted)
    committed = logged_event.last(events, CheckpointCommitted)
    # The last step was committed before the run ended; a storage that hangs now does not tell.
    last = committed.event if newest is None and committed is not None else newest
    if started is None or last is None:
        is_empty = started is None and last is None
        why = ": the recipe ended without training a step, since it took none from run.steps(data, state)"
        return [f"complete{why if is_empty else ''}; logs are in {run.logs}"]
    if is_first and not has_recorded_end(run):
        epochs = started.event.epochs_done(last.step)
        parts.log.record(RunFinished(steps=last.step, epochs=epochs, digest=last.digest))
    stopped = None
    with suppress(GivenUp):
        stopped = parts.shutdown.within(Share.REPORT, partial(read_stop, settings))
    what = f"complete: {last.step} steps" if stopped is None else str(stopped)
    what += f", digest {last.digest[:16]}{doubts.told_at_the_end(events, last.step)}"
    # One node of those that share the claims says it; in an object store each has its own.
    tells = is_first and not (run.is_remote and settings.options.max_nodes > 1)
    unreached = parts.faults.unreached(last.step) if tells else []
    return [*unreached, f"{what}; elastic-train report {run.url} shows how it went"]


def _interrupted(agent: NodeAgent, parts: AgentParts, saved_step: int) -> tuple[int, str]:
    """The exit code and the last line."""
    how, url = f"interrupted ({agent.end.reason})", parts.settings.run.url
    if parts.difference:
        return errors.EXIT_FAILED, f"{how}: {parts.difference}"
    if not parts.settings.imports_library:
        code, cut = errors.EXIT_INTERRUPTED, ""
        if agent.cut_short:
            code = errors.EXIT_FAILED
            cut = ": the script was stopped, and whatever it saved is its own (a script that ends with 0 at SIGTERM gives 75)"
        return code, f"{how}{cut}; the same command starts it again"
    if agent.last_step > saved_step:
        # What a group that gave up lacks, it lost with its nodes, and a scheduler starts this one
        # again. A state that this node has in memory, and could not save, is not such. A node that
        # has trained nothing leaves its state to the others.
        kept = parts.memory.newest
        is_lost = agent.gave_up and (kept is None or kept.info.step <= saved_step)
        is_well = is_lost or (agent.others_go_on and not agent.has_trained)
        again = f"the same command resumes there (steps to do again: {agent.last_step - saved_step})"
        what_follows = "the other nodes go on" if agent.others_go_on else again
        return errors.EXIT_INTERRUPTED if is_well else errors.EXIT_FAILED, (
            f"{how} after step {agent.last_step}, but step {saved_step} is the newest that is saved; {what_follows}"
        )
    saved = f"step {saved_step} is saved in {url}: the same command resumes"
    none = f"this node saw no saved step in {url}: the same command goes on"
    return errors.EXIT_INTERRUPTED, f"{how}; {saved if saved_step else none}"


def _failed(agent: NodeAgent, settings: Settings, newest: CommitRecord | None) -> list[str]:
    """The last lines, with the traceback of the worker that failed first."""
    failure, code, run = agent.failure, agent.end.exit_code, settings.run
    if failure is not None and is_own_exit(failure.message, code):
        return [f"{settings.options.recipe} ended with exit code {code}; its words are above"]
    saved = "; no step is saved" if newest is None else f"; step {newest.step} is the newest that is saved"
    if code == errors.EXIT_NOTHING_LOADS or not settings.imports_library:
        saved = ""  # the reason says it; or the script knows
    logs = f"; logs are in {run.logs}" if os.path.exists(run.logs) else ""  # noqa: PTH110 - Path.exists may raise
    lines = [f"training failed: {agent.end.reason}{saved}{logs}"]
    if failure is not None:
        lines.append(f"first failing worker: rank {failure.rank} on {failure.node}")
        words = failure.traceback.rstrip() or ("" if failure.message in agent.end.reason else failure.message)
        lines += [words] if words else []
    return lines


def check_finished(settings: Settings, committed_step: int) -> None:
    """Raises NothingLoads where the group has committed a newer step than the storage has.

    The run directory may be an old copy, from which another run would go on as if it were whole.
    """
    with suppress(errors.StoreFailed):
        if (newest := _newest_commit(settings)) < committed_step:
            raise errors.NothingLoads(missing_text(committed_step, newest, settings.run.url))


def is_finished(settings: Settings) -> bool:
    """Whether the run directory records the end, and has the last state.

    The group's state has no end of the run where its store is new. Raises UsageError, as
    `is_complete` does.
    """
    with suppress(errors.StoreFailed):
        ends = read_rare(settings.run.events, RunFinished) if is_complete(settings) else []
        return bool(ends) and _newest_commit(settings) >= max(each.event.steps for each in ends)
    return False


def _newest_commit(settings: Settings) -> int:
    records, damages = list_commits(open_store(settings.run.checkpoints_url), SystemClock())
    return max([*(each.step for each in records), *(each.step for each in damages)], default=0)


def finished_text(settings: Settings) -> str:
    url, finished, stopped = settings.run.url, None, read_stop(settings)
    if not settings.imports_library:
        return (
            f"this command has ended well in {url}; elastic-train report {url} shows it. Nothing was started:"
            " the script starts again with other arguments, or with another --run-dir"
        )
    with suppress(OSError):
        finished = logged_event.last(read_events(settings.run.events), RunFinished)
    length = "" if finished is None else f": {finished.event.steps} steps ({finished.event.epochs} epochs)"
    how = f"finished{length}" if stopped is None else f"finished: it was {stopped}"
    return (
        f"the run in {url} is {how}; elastic-train report {url} shows it. Nothing was trained. A longer run, or one with other"
        f" settings, begins from its state by {new_run_from(url, settings.options.recipe)}; another --run-dir begins anew"
    )


def read_stop(settings: Settings) -> stop_record.StopRecord | None:
    """Where the recipe ended this run early; None if it did not, or if the storage does not say."""
    with suppress(errors.ElasticError):
        return stop_record.read(open_store(settings.run.url), settings.run_id, SystemClock())
    return None
