"""Deleting never breaks a committed checkpoint, nor an attempt that may yet be committed.

A checkpoint's record is deleted first, and an uncommitted attempt only once no writer can commit
it. It does not promise to delete anything: a later run of it finds what a failed or interrupted one
left, from the listing alone.
"""

from dataclasses import dataclass

from elastic.checkpoint.catalog import list_commits, records_in
from elastic.checkpoint.record import CommitRecord, parse_attempt, parse_commit_name, parse_step
from elastic.checkpoint.retention import counted, to_delete, to_sweep
from elastic.storage.store import Store, reading
from elastic.system.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Keep the newest `keep` checkpoints of the run `run_id`; attempts are swept after two
    `save_deadline_s`.
    """

    run_id: str
    keep: int
    save_deadline_s: float


class Pruner:
    """Remembers when it first saw each uncommitted attempt.

    Such an age is of this process's own clock. The times that a store shows would have to be
    compared with the clock of another machine.
    """

    def __init__(self, store: Store, policy: RetentionPolicy, clock: Clock) -> None:
        self._store = store
        self._policy = policy
        self._clock = clock
        self._first_seen: dict[str, float] = {}

    def after_commit(self, *, step: int, generation: int, resumed_from: int | None) -> list[int]:
        """Apply the policy for `generation`, which committed `step`; the steps that were deleted,
        oldest first.

        resumed_from: as in `counted`. Raises StoreFailed.
        """
        entries = reading(self._store.list, self._clock)
        records, _ = records_in(entries, self._store, self._clock)
        present = {(entry.name, entry.size_bytes) for entry in entries}
        whole = [
            record
            for record in records
            # Checkpoints of another run may have far higher steps; counting them would delete ours.
            # So would counting a record whose payload is missing or has another size.
            if record.run_id == self._policy.run_id and (record.payload, record.size_bytes) in present
        ]
        steps = to_delete(
            counted(whole, step=step, generation=generation, resumed_from=resumed_from),
            keep=self._policy.keep,
        )
        deleted = [entry.name for entry in entries if parse_step(entry.name) in steps]
        # Of each step the record first: a crash then leaves a payload without a record, which is
        # not a checkpoint. In the other order it would leave a checkpoint that does not load.
        for name in sorted(deleted, key=lambda name: (parse_step(name), parse_commit_name(name) is None)):
            self._delete(name)
        others = [entry.name for entry in entries if parse_step(entry.name) not in steps]
        self._sweep(others, records, generation)
        return steps

    def _sweep(self, names: list[str], records: list[CommitRecord], generation: int) -> None:
        attempts = dict(attempt for name in names if (attempt := parse_attempt(name)))
        named = _attempts_of(records)
        uncommitted = {folder: by for folder, by in attempts.items() if folder not in named}
        now = self._clock.monotonic()
        self._first_seen = {folder: self._first_seen.get(folder, now) for folder in uncommitted}
        abandoned = to_sweep(
            uncommitted,
            self._first_seen,
            now=now,
            generation=generation,
            save_deadline_s=self._policy.save_deadline_s,
        )
        if abandoned:
            # List again: a record may have been created since the first listing. One that is
            # damaged may have named any attempt of its step, so all of that step's attempts stay.
            records, damages = list_commits(self._store, self._clock)
            gone = set(abandoned) - _attempts_of(records)
            unclear = {damage.step for damage in damages}
            for name in names:
                attempt = parse_attempt(name)
                if attempt and attempt[0] in gone and parse_step(name) not in unclear:
                    self._delete(name)

    def _delete(self, name: str) -> None:
        reading(lambda: self._store.delete(name), self._clock)


def _attempts_of(records: list[CommitRecord]) -> set[str]:
    return {record.payload.rpartition("/")[0] for record in records}
