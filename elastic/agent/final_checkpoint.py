"""Before a node leaves, the newest state in its memory is committed, within the grace period.

The node commits it itself, or sees that another one has, with the same state. A drain leaves the
state of its last step in the memory of every node, not in a checkpoint: the workers need not wait
for an upload, and most drains lead to a generation that has the state in memory. But the memory of
a node that leaves is lost with it, and exit code 75 promises that no step is lost.

A checkpoint that the run has passed over, because it is damaged, does not count: training fell back
behind it. It does not promise that the storage accepts the checkpoint. The exit code follows from
`newest_checkpoint` (exit_report.py).
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial

from elastic.agent.parts import AgentParts
from elastic.agent.shutdown_request import GivenUp
from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.commit import other_state_text
from elastic.checkpoint.record import CommitRecord
from elastic.errors import EXIT_FAILED, StoreFailed
from elastic.events import CheckpointDiffers
from elastic.rendezvous.group import RunEnd
from elastic.snapshot.slots import Snapshot
from elastic.storage.remote import open_store
from elastic.storage.store import READ_LIMIT_S
from elastic.system.leave_deadline import Share
from elastic.uploader.client import Handover, offer
from elastic.uploader.protocol import SaveResult, SaveState

POLL_S = 0.1
LOOK_SHARE = 0.25  # of the time that is left for a save: how long one look for it may take
RETRY_S = 0.25  # between the looks for a save, or its tries


def leave_group(parts: AgentParts, last_step: int, *, goes_alone: bool = False) -> bool:
    """Give up this node's place once its newest state is safe; the workers have stopped.

    last_step: that was trained, as far as this node knows. goes_alone: no other node goes on. Where
    other members have that state and go on with it, this node leaves before it is saved: they form
    their next generation at once and need not wait for an upload. Once they have, the fence stops a
    save by this node: then the checkpoint is theirs to commit. Where no other node has it, the next
    generation waits for the save. Returns whether other members go on.
    """
    parts.health.end()
    others_go_on, place = parts.group.withdraw(
        lambda number: not goes_alone and parts.has_shared_state(number)
    )
    if place is not None:
        # It may be one that this node was told to leave before it entered it. The next one waits
        # for the save, which must not be fenced by this one.
        parts.uploader.enter(place)
    ensure_committed(parts, others=others_go_on)
    parts.note_commit()
    if parts.settings.imports_library:  # a plain script's state is its own
        parts.shutdown.ends(last_step)
    if parts.difference:
        # Nothing says which of the two states is right: no node goes on with either of them, in
        # whichever generation it is by now.
        reason = f"{parts.settings.node}, which leaves, found two states of one step: {parts.difference}"
        parts.group.end(RunEnd(exit_code=EXIT_FAILED, reason=reason), of_any=True)
    parts.group.leave()
    return others_go_on


def ensure_committed(parts: AgentParts, *, others: bool) -> None:
    """Return once a checkpoint holds the newest step in memory, or the time for it is over.

    others: other nodes go on with the same state. They are given half of the time to commit it: the
    node of their rank 0 offers it to its uploader as soon as their next generation starts, and a
    second upload of the same bytes would only compete with theirs. Where their generation fences
    the save of this node, they are given the rest. A save that fails is tried again: the uploader
    may have been killed, or the disk full for a moment. One try is made also where no time is left:
    a save that is handed over may still end.
    """
    if (newest := parts.memory.newest) is None:
        return
    is_over, others_are_late, result = _end_of(parts), _end_of(parts, 0.5), None
    while not _is_saved(parts, newest):
        if (result is None or result.state is not SaveState.FENCED) and (not others or others_are_late()):
            result = _try(parts, newest, is_over)
            if result.state is SaveState.COMMITTED:
                parts.shutdown.saved(result.step)
                return
            if result.state is SaveState.DIFFERS:
                parts.difference = result.reason
                return
        if result is not None and (is_over() or (result.state is SaveState.FENCED and not others)):
            parts.console.print_line(f"checkpoint step={result.step} is not saved: {result.reason}")
            return
        parts.revive_uploader()
        parts.clock.sleep(RETRY_S)


def newest_checkpoint(
    parts: AgentParts, *, step: int, generation: int, is_new: bool = False
) -> CommitRecord | None:
    """None where the storage holds no checkpoint of this run, or does not answer.

    step: the last that was trained, in this generation; 0 where this node does not know it. is_new:
    it was trained, and not only restored: then a checkpoint of it from an older generation was
    passed over by the run, unless a save of this node has found it whole. The storage is asked, and
    not the event log: an uploader may die after its commit and before it records the event.
    """

    def counts(record: CommitRecord) -> bool:
        if not step or record.step < step or record.generation >= generation:
            return True
        return record.step == step and (not is_new or step == parts.shutdown.saved_step)

    found = _records(parts, Share.REPORT, READ_LIMIT_S)
    return max(filter(counts, found), key=lambda record: (record.step, record.digest != ""), default=None)


def offer_newest(parts: AgentParts) -> None:
    """Have the uploader commit the newest snapshot; does not wait for the result."""
    if (newest := parts.memory.newest) is not None:
        try:
            _offer(parts, newest).close()
        except StoreFailed as error:
            parts.console.print_line(f"the newest state is not saved: {error}")


def finish_saves(parts: AgentParts) -> None:
    """Stop the uploader once it has finished its saves, or the time for them is over."""
    shutdown, began_s = parts.shutdown, parts.clock.monotonic()
    parts.uploader.finish(
        lambda line: None if shutdown.reason else parts.console.print_line(line),
        ended_by="SIGTERM or Ctrl-C shortens that to --grace",
        is_over=lambda: parts.clock.monotonic() >= shutdown.end_s(Share.SAVE, began_s),
    )


def _end_of(parts: AgentParts, part: float = 1.0) -> Callable[[], bool]:
    """Whether this part of the time for a save, from now on, is over."""
    began_s = parts.clock.monotonic()

    def is_over() -> bool:
        end_s = parts.shutdown.end_s(Share.SAVE, began_s, parts.shutdown.grace_s)
        return parts.clock.monotonic() >= began_s + part * (end_s - began_s)

    return is_over


def _is_saved(parts: AgentParts, newest: Snapshot) -> bool:
    """Whether the run can go on from a checkpoint without losing a step of `newest`.

    A checkpoint of an older generation is behind this one, or was passed over. One of the very step
    is compared by the checksum of its image: the uploader, which would say the same, would upload
    the state first, and a newer generation fences it.
    """
    info, left_s = newest.info, parts.shutdown.left_s(Share.SAVE, parts.shutdown.grace_s)
    # A store that does not answer this may still take a save.
    records = _records(parts, Share.SAVE, left_s * LOOK_SHARE)
    found = [e for e in records if e.step >= info.step and e.generation >= info.generation]
    # Retention may have deleted the step for a newer one: then there is nothing to compare.
    same = next((each for each in found if each.step == info.step), None)
    if same is not None and info.checksum not in ("", same.checksum):
        parts.difference = other_state_text(same)
        parts.log.record(CheckpointDiffers(step=info.step, reason=parts.difference))
    elif found:
        parts.shutdown.saved(info.step)
    return bool(found)


def _records(parts: AgentParts, share: Share, longest_s: float) -> list[CommitRecord]:
    until_s = parts.shutdown.end_s(share, parts.clock.monotonic(), longest_s)
    store, run_id = open_store(parts.settings.run.checkpoints_url), parts.settings.run_id
    look = partial(list_commits, store, parts.clock, run_id=run_id, until_s=until_s)
    try:
        return parts.shutdown.within(share, look, longest_s=longest_s)[0]
    except StoreFailed as error:
        problem = str(error)
    except GivenUp:
        problem = "the storage does not answer"
    if problem not in parts.unlisted:
        parts.unlisted.add(problem)
        parts.console.print_line(f"the checkpoints cannot be listed: {problem}")
    return []


def _try(parts: AgentParts, newest: Snapshot, is_over: Callable[[], bool]) -> SaveResult:
    step, problem = newest.info.step, "its save had not ended"
    try:
        with closing(_offer(parts, newest)) as handover:
            while not is_over():
                if (result := handover.wait(POLL_S)) is not None:
                    return result
                parts.revive_uploader()
    except StoreFailed as error:
        problem = str(error)
    return SaveResult(step=step, state=SaveState.FAILED, reason=problem)


def _offer(parts: AgentParts, newest: Snapshot) -> Handover:
    """Raises StoreFailed after a short time: this agent must start an uploader that died."""
    path, slots = parts.uploader.socket_path, parts.memory.slots
    assert slots is not None, "a snapshot lies in a slot"
    return offer(path, slots, newest, resumed_from=None, final=True)
