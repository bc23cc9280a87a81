"""Deleting never breaks a committed checkpoint, nor an attempt that may yet be committed.

A checkpoint's record is deleted first, then the payload that it named; an uncommitted attempt only
once no writer can commit it. Only the newest generation deletes: an older one does not know which
checkpoints were found to be damaged since. The newest checkpoints stay, and those that a resume
passed over do not count as such. It does not promise to delete anything: a later run of it finds
what a failed or interrupted one left, from the listing alone.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from elastic.checkpoint.catalog import list_commits, records_in
from elastic.checkpoint.record import CommitRecord, parse_attempt, parse_commit_name, parse_step, save_limit_s
from elastic.errors import Fenced
from elastic.storage.store import Store, StoredObject, reading
from elastic.system.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Keep the newest `keep` checkpoints of the run `run_id`; attempts are swept after two save
    deadlines, of which `save_deadline_s` is the part that the size does not change.
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

    def after_commit(
        self, *, step: int, generation: int, resumed_from: int | None, is_newest: Callable[[], bool]
    ) -> list[int]:
        """Apply the policy for `generation`, which committed `step`; the steps that were deleted,
        oldest first.

        resumed_from: as in `counted`. is_newest: whether `generation` is the newest; it is asked
        before the listing and before each deletion. Raises Fenced once it is not; StoreFailed.
        """

        def delete(name: str) -> None:
            _check(generation, is_newest)
            reading(lambda: self._store.delete(name), self._clock)

        _check(generation, is_newest)
        entries = reading(self._store.list, self._clock)
        by_name, damages, _ = records_in(entries, self._store, self._clock)
        records = list(by_name.values())
        whole = self._whole(records, entries)
        counting = counted(whole, step=step, generation=generation, resumed_from=resumed_from)
        steps = to_delete(counting, keep=self._policy.keep)
        oldest_kept = min(counting - set(steps), default=0)
        unclear = {damage.step for damage in damages}
        useless = {step for step in self._without_payload(records, entries) if step < oldest_kept} - unclear
        deleted = self._names_of({*steps, *useless}, by_name, entries)
        for name in deleted:
            delete(name)
        self._sweep([each.name for each in entries if each.name not in deleted], records, generation, delete)
        return steps

    def _whole(self, records: list[CommitRecord], entries: list[StoredObject]) -> list[CommitRecord]:
        """Those of this run whose payloads have the right size.

        Checkpoints of another run may have far higher steps; counting them would delete ours. So
        would counting one without its payload.
        """
        present = {(entry.name, entry.size_bytes) for entry in entries}
        return [
            record
            for record in records
            if record.run_id == self._policy.run_id and (record.payload, record.size_bytes) in present
        ]

    def _without_payload(self, records: list[CommitRecord], entries: list[StoredObject]) -> set[int]:
        """Steps whose every record is of this run and names a payload that is missing."""
        names = {entry.name for entry in entries}
        missing = [
            each for each in records if each.payload not in names and each.run_id == self._policy.run_id
        ]
        return {each.step for each in missing} - {each.step for each in records if each not in missing}

    def _names_of(
        self, steps: set[int], by_name: dict[str, CommitRecord], entries: list[StoredObject]
    ) -> list[str]:
        """The commit records of these steps and the payloads that they name, in the order to
        delete, without those of other runs.

        Of each step the records come first: a crash then leaves a payload without a record, which
        is not a checkpoint. In the other order it would leave a checkpoint that does not load. An
        attempt that no record names may be another writer's, who is about to commit it: it is left
        to the sweep.
        """
        foreign = {name for name, record in by_name.items() if record.run_id != self._policy.run_id}
        named = _attempts_of([record for name, record in by_name.items() if name not in foreign])
        found = [
            (step, place is None, entry.name)
            for entry in entries
            if (step := parse_step(entry.name)) in steps
            and entry.name not in foreign
            and ((place := parse_commit_name(entry.name)) or (parse_attempt(entry.name) or ("",))[0] in named)
        ]
        return [name for _, _, name in sorted(found)]

    def _sweep(
        self,
        names: list[str],
        records: list[CommitRecord],
        generation: int,
        delete: Callable[[str], None],
    ) -> None:
        attempts = dict(attempt for name in names if (attempt := parse_attempt(name)))
        named = _attempts_of(records)
        uncommitted = {folder: by for folder, by in attempts.items() if folder not in named}
        now, largest = self._clock.monotonic(), max((each.size_bytes for each in records), default=0)
        self._first_seen = {folder: self._first_seen.get(folder, now) for folder in uncommitted}
        abandoned = to_sweep(
            uncommitted,
            self._first_seen,
            now=now,
            generation=generation,
            save_deadline_s=save_limit_s(self._policy.save_deadline_s, largest),
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
                    delete(name)


def _check(generation: int, is_newest: Callable[[], bool]) -> None:
    if not is_newest():
        raise Fenced(f"generation {generation} is not the newest: a newer one deletes old checkpoints")


def _attempts_of(records: list[CommitRecord]) -> set[str]:
    return {record.payload.rpartition("/")[0] for record in records}


def to_delete(counted_steps: Iterable[int], *, keep: int) -> list[int]:
    """Steps to delete, oldest first: all but the newest `keep`. Raises ValueError for `keep` below
    1.
    """
    if keep < 1:
        raise ValueError(f"expected to keep at least 1 checkpoint, found keep={keep}")
    return sorted(set(counted_steps))[:-keep]


def counted(
    records: Iterable[CommitRecord], *, step: int, generation: int, resumed_from: int | None
) -> set[int]:
    """Steps that retention, after `step` was committed, may count among the newest, and may delete.

    A checkpoint that did not load was passed over at a resume. If it counted as one of the newest,
    a good one would be deleted in its favour. A record above `step` is such a one, because training
    was behind it. So is a record of an older generation above `resumed_from`, the step of the
    checkpoint from which this generation resumed; None where it resumed from memory. And so is one
    above a checkpoint of a later generation than its own, as long as that is there.
    """
    before = step if resumed_from is None else resumed_from
    there = list(records)
    return {
        record.step
        for record in there
        if record.step <= (step if record.generation >= generation else before)
        and not any(each.generation > record.generation and each.step < record.step for each in there)
    }


def to_sweep(
    uncommitted: Mapping[str, int],
    first_seen: Mapping[str, float],
    *,
    now: float,
    generation: int,
    save_deadline_s: float,
) -> list[str]:
    """Attempts that no writer can commit any more: of an older generation, and seen for two save
    deadlines.

    `uncommitted` maps the folder of an attempt to the generation that wrote it, and `first_seen` to
    the time when this process saw it first, in seconds on the clock of `now`. A writer stops by
    itself after one deadline; the second one is for a call that was on its way then.
    """
    return sorted(
        attempt
        for attempt, written_by in uncommitted.items()
        if written_by < generation and now - first_seen.get(attempt, now) > 2 * save_deadline_s
    )
