"""A checkpoint exists once its commit record does, and the commit record is created last.

    <step>/a-<generation>-<id>/state.safetensors   the payload; no other attempt has this folder
    <step>/a-<generation>-<id>/COMMIT.json         created after the payload

The protocol, whose steps `commit` lists:

1. Store the payload in the folder of a new attempt, while it is hashed.
2. Compare the size that the store reports.
3. Look whether another writer has committed this step; a good checkpoint of it stays the only one.
4. Ask whether this writer may go on: its deadline has not passed, and its node is a member of the
   newest generation. Without an agent there are no generations to ask for.
5. Create the commit record.
6. Look whether the payload is still there.

Why it holds. Attempts share no name, so two writers never mix their files: a writer that was taken
for dead, and wakes up, can only complete its own attempt. A record appears whole, so that a reader
sees a complete checkpoint or none. Two writers that commit one step at the same moment leave two
complete checkpoints of it, whose states are not compared.

It does not promise that a save succeeds, nor that a failed one leaves nothing behind: prune.py
sweeps what was not committed.
"""

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.payload_check import check_state, digest_of
from elastic.checkpoint.record import (
    FORMAT,
    PAYLOAD,
    CommitRecord,
    Hashes,
    Part,
    Save,
    attempt_name,
    step_dir,
)
from elastic.errors import CheckpointDamaged, Fenced, StoreFailed
from elastic.storage.store import (
    ObjectNotFound,
    Payload,
    Store,
    StoreUnavailable,
    read_small,
    reading,
    retrying,
)
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

    `is_ours` is False when another writer had committed this step before. `difference`: it had
    another state, so that one of the two is wrong, in words.
    """

    record: CommitRecord
    is_ours: bool
    difference: str


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
    write = Write(store, save, limits, clock, uuid.uuid4().hex[:8])
    name = f"{write.folder}/{PAYLOAD}"
    try:
        write.upload(name, payload, reached)
        record = write.record(hashed(), payload.size_bytes)
        reached("before-commit")
        if (other := write.other()) is None:
            write.publish(record)
    except (StoreFailed, CheckpointDamaged, Fenced):
        write.drop(name)
        raise
    if other is not None:
        write.drop(name)
    reached("after-commit")
    found = record if other is None else other
    is_other = other is not None and are_other_states(other, record, store, clock)
    difference = other_state_text(found) if is_other else ""
    return Committed(record=found, is_ours=other is None, difference=difference)


class Write:
    """One attempt to save, or a node's part in it.

    `_is_in_doubt`: a commit record of this attempt may exist, or may yet appear, although no read
    has found it.
    """

    def __init__(self, store: Store, save: Save, limits: WriteLimits, clock: Clock, own: str) -> None:
        self.attempt = attempt_name(save.generation, own)
        self.folder = f"{step_dir(save.step)}/{self.attempt}"
        self._store = store
        self._save = save
        self._limits = limits
        self._clock = clock
        self._is_in_doubt = False

    def record(self, hashes: Hashes, size_bytes: int, parts: tuple[Part, ...] = ()) -> CommitRecord:
        return CommitRecord(
            format=FORMAT,
            attempt=self.attempt,
            size_bytes=size_bytes,
            created=self._clock.wall(),
            parts=parts,
            **asdict(self._save),
            **asdict(hashes),
        )

    def check_may_go_on(self) -> None:
        if self._limits.is_fenced():
            raise Fenced(
                f"the save of step {self._save.step} is of generation {self._save.generation}; a newer generation exists"
            )
        if self._clock.monotonic() >= self._limits.deadline:
            raise StoreFailed(
                f"the save of step {self._save.step} was not committed before its deadline; is the storage slow?"
            )

    def upload(self, name: str, payload: Payload, reached: Callable[[str], None]) -> None:
        def once() -> int:
            # Before every try: a save that waits for its storage must not go on for ever.
            self.check_may_go_on()
            return self._store.write(name, payload, lambda: reached("upload"))

        stored_bytes = retrying(once, clock=self._clock, deadline=self._limits.deadline)
        if stored_bytes != payload.size_bytes:
            raise StoreFailed(
                f"the store reports {stored_bytes} bytes for {name}, expected {payload.size_bytes}; it is not committed"
            )

    def other(self) -> CommitRecord | None:
        """Of a whole checkpoint that another writer has made of this step.

        The run may have fallen back behind a damaged one, and reach its step again. Another
        writer's checkpoint is never touched: deleting it could race with a reader. Readers take the
        latest.
        """
        self.check_may_go_on()
        records, _ = list_commits(
            self._store, self._clock, run_id=self._save.run_id, until_s=self._limits.deadline
        )
        for each in records:
            if each.step == self._save.step and each.attempt != self.attempt:
                with suppress(CheckpointDamaged):
                    check_state(self._store, each, self._clock)
                    return each
        return None

    def publish(self, record: CommitRecord) -> None:
        def once() -> None:
            # The last look before the record. A newer generation may still begin between this line
            # and the creation. Then a checkpoint of the older one appears late; it is complete, and
            # its state lies on the trajectory that the newer generation passes through as well.
            self.check_may_go_on()
            # From here on this save does not delete its payload. A call that fails may have created
            # the record all the same (a full disk may fail the sync of a name that is there
            # already), or its request is still on its way. Where the name is taken, it is by such a
            # call.
            self._is_in_doubt = True
            try:
                self._store.create(record.name, record.to_json())
            except StoreUnavailable:  # a store may lose each answer, and do what is asked
                if read_small(self._store, record.name, self._clock) is None:
                    raise

        retrying(once, clock=self._clock, deadline=self._limits.deadline)
        self._check_is_there(record)

    def _check_is_there(self, record: CommitRecord) -> None:
        """A writer that stood still before it created its record may name what retention or
        `--fresh` has taken: such a record is damage, so it is deleted. After the deadline, when
        retention may be at it, the whole payload is read.

        Raises StoreFailed.
        """
        when = "when its payload was gone"
        try:
            if self._clock.monotonic() >= self._limits.deadline:
                when = "after its deadline"
                check_state(self._store, record, self._clock)
            else:
                for each in record.payloads:
                    reading(partial(self._begin, each.name), self._clock)
        except (CheckpointDamaged, ObjectNotFound) as error:
            with suppress(StoreFailed):  # then a later retention deletes it
                self._store.delete(record.name)
            raise StoreFailed(
                f"the commit record of step {record.step} was created {when}, and {error};"
                " is the storage slow, or did this process stand still?"
            ) from error

    def _begin(self, name: str) -> bytes:
        return next(iter(self._store.read(name)), b"")

    def drop(self, name: str) -> None:
        """Delete a payload that was not committed, unless its record may yet appear."""
        if not self._is_in_doubt:
            # The sweep deletes what stays behind; the caller needs the outcome of the save itself.
            with suppress(StoreFailed):
                self._store.delete(name)


def are_other_states(a: CommitRecord, b: CommitRecord, store: Store, clock: Clock) -> bool:
    """Whether two saves of one step differ. Raises CheckpointDamaged, StoreFailed."""
    if a.parts and b.parts:
        return a.checksum != b.checksum
    return digest_of(store, a, clock) != digest_of(store, b, clock)


def other_state_text(found: CommitRecord) -> str:
    """Says that this process has another state of a committed step."""
    return (
        f"step {found.step} was already committed by generation {found.generation} with another state: one of the two is wrong."
        " The same command goes on from the committed one. To do the step again, move "
        f"checkpoints/{step_dir(found.step)} out of the run directory and remove rendezvous/ (etcd, c10d: another --rdzv-id)"
    )
