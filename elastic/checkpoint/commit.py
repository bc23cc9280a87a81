"""A checkpoint exists once its commit record does, and the record is created last, by a writer that still may.

It does not promise that a save succeeds, or that a failed one left nothing: what is not committed is swept later.
Why it holds: attempts share no name, so two writers cannot mix files; a record is created exclusively and whole, so readers see a
complete checkpoint or none; every doubtful answer is settled by reading the record back.
"""

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial

from elastic.checkpoint.catalog import check_payload, read_record
from elastic.checkpoint.record import (
    FORMAT,
    RECORDS_PER_STEP,
    CommitRecord,
    Save,
    attempt_dir,
    commit_name,
    payload_name,
)
from elastic.errors import CheckpointDamaged, Fenced, StoreFailed
from elastic.storage.store import Payload, Store, StoreUnavailable, retrying
from elastic.system.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimits:
    """When a writer must stop by itself: after `deadline` (monotonic seconds), or once `is_fenced` says a newer generation exists."""

    deadline: float
    is_fenced: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """`record` is in the store; `is_ours` is False when another writer had committed this step before, `reason` says it in words."""

    record: CommitRecord
    is_ours: bool
    reason: str


class Action(Enum):
    OURS = "ours"
    THEIRS = "theirs"
    REPLACE = "replace"
    AGAIN = "again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    action: Action
    reason: str


def settle(ours: CommitRecord, found: CommitRecord | CheckpointDamaged | None) -> Decision:
    """What a record that was read back means for the writer of `ours`; `found` is damaged when it or its payload is."""
    match found:
        case None:
            return Decision(action=Action.AGAIN, reason="no commit record was found after creating it")
        case CheckpointDamaged():
            return Decision(
                action=Action.REPLACE, reason=f"step {ours.step} is committed but damaged: {found}"
            )
        case CommitRecord(write_id=write_id) if write_id == ours.write_id:
            return Decision(action=Action.OURS, reason="committed")
        case CommitRecord(digest=digest) if digest != ours.digest:
            reason = (
                f"step {ours.step} was already committed by generation {found.generation} with another state "
                f"(digest {digest[:16]}, ours {ours.digest[:16]}): that one stays; was it trained with other software or hardware?"
            )
            return Decision(action=Action.THEIRS, reason=reason)
        case CommitRecord():
            return Decision(
                action=Action.THEIRS, reason=f"already committed by generation {found.generation}"
            )


def commit(
    store: Store,
    payload: Payload,
    save: Save,
    *,
    limits: WriteLimits,
    clock: Clock,
    reached: Callable[[str], None],
) -> Committed:
    """Store the payload, then make it a checkpoint.

    `reached` is called with upload (while the payload is written), before-commit and after-commit.
    Raises Fenced when a newer generation exists, StoreFailed when the store does not take it before the deadline.
    """
    write = _Write(store, save, limits, clock)
    write.may_go_on()
    payload.check_size()
    sha256 = payload.sha256()
    record = write.record(sha256, payload.size_bytes)
    try:
        write.upload(payload, record, reached)
        reached("before-commit")
        committed = write.publish(record)
    except (StoreFailed, Fenced):
        write.drop(record)
        raise
    if not committed.is_ours:
        write.drop(record)
    reached("after-commit")
    return committed


class _Write:
    """One attempt to save; `_is_in_doubt` once a commit record may have been created that nobody has seen."""

    def __init__(self, store: Store, save: Save, limits: WriteLimits, clock: Clock) -> None:
        self._store = store
        self._save = save
        self._limits = limits
        self._clock = clock
        self._is_in_doubt = False

    def record(self, sha256: str, size_bytes: int) -> CommitRecord:
        write_id = uuid.uuid4().hex
        return CommitRecord(
            format=FORMAT,
            write_id=write_id,
            attempt=attempt_dir(self._save.generation, write_id),
            size_bytes=size_bytes,
            sha256=sha256,
            created=self._clock.wall(),
            **asdict(self._save),
        )

    def may_go_on(self) -> None:
        if self._limits.is_fenced():
            raise Fenced(
                f"the save of step {self._save.step} is of generation {self._save.generation}; a newer generation exists"
            )
        if self._clock.monotonic() >= self._limits.deadline:
            raise StoreFailed(
                f"the save of step {self._save.step} was not committed before its deadline; is the storage slow?"
            )

    def upload(self, payload: Payload, record: CommitRecord, reached: Callable[[str], None]) -> None:
        def once() -> int:
            self.may_go_on()
            return self._store.write(
                payload_name(record.step, record.attempt), payload, lambda: reached("upload")
            )

        stored_bytes = retrying(once, clock=self._clock, deadline=self._limits.deadline)
        if stored_bytes != payload.size_bytes:
            raise StoreFailed(
                f"the store reports {stored_bytes} bytes for {record.payload}, expected {payload.size_bytes}; it is not committed"
            )

    def publish(self, record: CommitRecord) -> Committed:
        for number in range(RECORDS_PER_STEP):
            create = partial(self._create_once, commit_name(record.step, number), record)
            decision, found = retrying(create, clock=self._clock, deadline=self._limits.deadline)
            match decision.action:
                case Action.OURS | Action.THEIRS:
                    return Committed(
                        record=found, is_ours=decision.action is Action.OURS, reason=decision.reason
                    )
                case Action.REPLACE:
                    continue
                case Action.AGAIN:
                    raise AssertionError("retrying returns settled decisions only")
        raise StoreFailed(
            f"all {RECORDS_PER_STEP} commit records of step {record.step} are damaged; elastic-train verify lists the damage"
        )

    def _create_once(self, name: str, record: CommitRecord) -> tuple[Decision, CommitRecord]:
        self.may_go_on()
        found: CommitRecord | CheckpointDamaged | None
        try:
            if self._store.create(name, record.to_json()):
                return settle(record, record), record
        except StoreUnavailable:
            # It may have been created all the same, now or later: only reading it back can tell.
            self._is_in_doubt = True
        try:
            found = read_record(self._store, name, record.step, self._clock)
            if found is not None and found.run_id != record.run_id:
                raise CheckpointDamaged(f"it is of another run ({found.run_id!r:.40})")
            if found is not None and found.write_id != record.write_id:
                # Giving up our own good copy for theirs is right only if theirs loads.
                check_payload(self._store, found, self._clock)
        except CheckpointDamaged as error:
            found = error
        decision = settle(record, found)
        if decision.action is Action.AGAIN:
            raise StoreUnavailable(decision.reason)
        return decision, found if isinstance(found, CommitRecord) else record

    def drop(self, record: CommitRecord) -> None:
        """Delete an attempt that was not committed, unless its record may yet turn up and name it."""
        if not self._is_in_doubt:
            # What stays behind is swept later; the save's own outcome is what matters to the caller.
            with suppress(StoreFailed):
                self._store.delete(record.payload)
