"""A checkpoint exists once its commit record does, and the commit record is created last.

    <step>/a-<generation>-<id>/state.safetensors   the payload; no other attempt has this name
    <step>/COMMIT.json                             created exclusively, after the payload

The protocol, whose steps `commit` lists:

1. Store the payload under the name of a new attempt, while it is hashed.
2. Compare the size that the store reports.
3. Ask whether this writer may go on: its deadline has not passed, and its node is a member of the
   newest generation. Without an agent there are no generations to ask for.
4. Create the commit record exclusively, and read it back after every doubtful answer.
5. Look whether the payload is still there.

Why it holds. Attempts share no name, so two writers never mix their files: a writer that was taken
for dead, and wakes up, can only complete its own attempt. A record appears whole, so that a reader
sees a complete checkpoint or none. Where a service ignores the exclusive creation, the later record
replaces the earlier one, and either names a complete payload.

It does not promise that a save succeeds, nor that a failed one leaves nothing behind: prune.py
sweeps what was not committed.
"""

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from elastic.checkpoint.catalog import read_record
from elastic.checkpoint.payload_check import check_state
from elastic.checkpoint.record import (
    FORMAT,
    RECORDS_PER_STEP,
    CommitRecord,
    Hashes,
    Save,
    attempt_dir,
    commit_name,
    payload_name,
    step_dir,
)
from elastic.errors import CheckpointDamaged, Fenced, StoreFailed
from elastic.storage.store import ObjectNotFound, Payload, Store, StoreUnavailable, reading, retrying
from elastic.system.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimits:
    """When a writer must stop by itself.

    After `deadline`, in seconds of the monotonic clock, nobody waits for it. Once `is_fenced`, a
    newer generation exists without this writer's node.
    """

    deadline: float
    is_fenced: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """`record` is in the store.

    `is_ours` is False when another writer had committed this step before; `reason` says so in
    words. `differs`: it had another state, so that one of the two is wrong.
    """

    record: CommitRecord
    is_ours: bool
    reason: str
    differs: bool = False


def commit(  # noqa: PLR0913 - the seam of the protocol to everything outside it
    store: Store,
    payload: Payload,
    save: Save,
    *,
    limits: WriteLimits,
    clock: Clock,
    reached: Callable[[str], None],
    hashed: Callable[[], Hashes],
) -> Committed:
    """Store the payload, then make it a checkpoint.

    `hashed` gives its hashes, for which it may wait; it is called once the payload is stored.
    `reached` is called with upload (while the payload is written), before-commit and after-commit.
    Raises Fenced when a newer generation exists without this node, StoreFailed when the store does
    not take the checkpoint before the deadline, and what `hashed` raises.
    """
    write = _Write(store, save, limits, clock)
    try:
        write.upload(payload, reached)
        record = write.record(hashed(), payload.size_bytes)
        reached("before-commit")
        committed = write.publish(record)
    except (StoreFailed, CheckpointDamaged, Fenced):
        write.drop()
        raise
    if not committed.is_ours:
        write.drop()
    reached("after-commit")
    return committed


class _Write:
    """One attempt to save.

    `_is_in_doubt`: a commit record of this attempt may exist, or may yet appear, although no read
    has found it.
    """

    def __init__(self, store: Store, save: Save, limits: WriteLimits, clock: Clock) -> None:
        self._store = store
        self._save = save
        self._limits = limits
        self._clock = clock
        self._is_in_doubt = False
        self._write_id = uuid.uuid4().hex
        self._attempt = attempt_dir(save.generation, self._write_id)
        self._payload = payload_name(save.step, self._attempt)

    def record(self, hashes: Hashes, size_bytes: int) -> CommitRecord:
        return CommitRecord(
            format=FORMAT,
            write_id=self._write_id,
            attempt=self._attempt,
            size_bytes=size_bytes,
            created=self._clock.wall(),
            **asdict(self._save),
            **asdict(hashes),
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

    def upload(self, payload: Payload, reached: Callable[[str], None]) -> None:
        def once() -> int:
            # Before every try: a save that waits for its storage must not go on for ever.
            self.may_go_on()
            return self._store.write(self._payload, payload, lambda: reached("upload"))

        stored_bytes = retrying(once, clock=self._clock, deadline=self._limits.deadline)
        if stored_bytes != payload.size_bytes:
            raise StoreFailed(
                f"the store reports {stored_bytes} bytes for {self._payload}, expected {payload.size_bytes}; it is not committed"
            )

    def publish(self, record: CommitRecord) -> Committed:
        # The run may have fallen back behind a damaged checkpoint, and reach its step again; or the
        # record is of another run. It is never touched: deleting it could race with a reader or
        # another writer. Ours gets the next name instead, and readers take the latest.
        for number in range(RECORDS_PER_STEP):
            name = commit_name(record.step, number)
            create = partial(self._create_once, name, record)
            committed = retrying(create, clock=self._clock, deadline=self._limits.deadline)
            if committed is not None:
                self._check_is_there(name, committed)
                return committed
        raise StoreFailed(
            f"all {RECORDS_PER_STEP} commit records of step {record.step} are damaged or of another run; elastic-train verify lists the damage"
        )

    def _create_once(self, name: str, record: CommitRecord) -> Committed | None:
        """None when the name is taken by a checkpoint that is damaged or of another run."""
        # The last look before the record. A newer generation may still begin between this line and
        # the creation. Then a checkpoint of the older one appears late; it is complete, and its
        # state lies on the trajectory that the newer generation passes through as well.
        self.may_go_on()
        try:
            if self._store.create(name, record.to_json()):
                return _committed(record, record)
            # False does not mean that another writer was here: a storage library repeats a request
            # whose answer was lost, and then finds the record that its first request created.
        except StoreFailed as error:
            # The record may have been created all the same (a full disk may fail the sync of a name
            # that is there already), or may be yet, by a request that is still on its way. So
            # nothing deletes its payload. Reading it back is the only way to find out.
            self._is_in_doubt = True
            if not isinstance(error, StoreUnavailable):
                raise
        try:
            found = read_record(self._store, name, record.step, self._clock)
            if found is None:
                raise StoreUnavailable("no commit record was found after creating it")
            if found.run_id != record.run_id:
                return None
            if found.write_id != record.write_id:
                # Our own good copy is given up for theirs only if theirs loads.
                check_state(self._store, found, self._clock)
        except CheckpointDamaged:
            return None
        return _committed(record, found)

    def _check_is_there(self, name: str, committed: Committed) -> None:
        """A writer that stood still before it created its record may name what retention or
        `--fresh` has taken: such a record is damage, so it is deleted. After the deadline, when
        retention may be at it, the whole payload is read.

        Raises StoreFailed.
        """
        if not committed.is_ours:
            return
        self._is_in_doubt = True  # the record exists: nothing may delete its payload
        record, when = committed.record, "when its payload was gone"
        try:
            if self._clock.monotonic() >= self._limits.deadline:
                when = "after its deadline"
                check_state(self._store, record, self._clock)
            else:
                reading(lambda: next(iter(self._store.read(record.payload)), b""), self._clock)
        except (CheckpointDamaged, ObjectNotFound) as error:
            with suppress(StoreFailed):  # then a later retention deletes it
                self._store.delete(name)
            raise StoreFailed(
                f"the commit record of step {record.step} was created {when}, and {error};"
                " is the storage slow, or did this process stand still?"
            ) from error

    def drop(self) -> None:
        """Delete an attempt that was not committed, unless its record may yet appear."""
        if not self._is_in_doubt:
            # The sweep deletes what stays behind; the caller needs the outcome of the save itself.
            with suppress(StoreFailed):
                self._store.delete(self._payload)


def _committed(ours: CommitRecord, found: CommitRecord) -> Committed:
    """What the record that the store holds means for the writer of `ours`."""
    if found.write_id == ours.write_id:
        return Committed(record=found, is_ours=True, reason="committed")
    if found.digest == ours.digest:
        return Committed(
            record=found, is_ours=False, reason=f"already committed by generation {found.generation}"
        )
    return Committed(record=found, is_ours=False, reason=other_state_text(found), differs=True)


def other_state_text(found: CommitRecord) -> str:
    """Says that this process has another state of a committed step."""
    return (
        f"step {found.step} was already committed by generation {found.generation} with another state: one of the two is wrong."
        " The same command goes on from the committed one. To do the step again, move "
        f"checkpoints/{step_dir(found.step)} out of the run directory and remove rendezvous/ (etcd, c10d: another --rdzv-id)"
    )
