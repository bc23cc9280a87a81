"""Deleting never breaks a committed checkpoint, nor an attempt that may yet be committed.

A checkpoint's record is deleted first, then the payload that it named; an uncommitted attempt only
once no writer can commit it. Only the newest generation deletes: an older one does not know which
checkpoints were found to be damaged since. The newest checkpoints stay, and those that a resume
passed over do not count as such. It does not promise to delete anything: a later run of it finds
what a failed or interrupted one left, from the listing alone.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from elastic.checkpoint.catalog import list_commits, records_in
from elastic.checkpoint.record import CommitRecord, parse_name, save_limit_s
from elastic.errors import Fenced
from elastic.storage.store import Store, reading
from elastic.system.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Keep the newest `keep` checkpoints, at least one, of the run `run_id`.

    Attempts are swept after two save deadlines; `save_deadline_s` is their part that the size does
    not change.
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

        resumed_from: as in `may_count`. is_newest: whether `generation` is the newest; it is asked
        before the listing and before each deletion. Raises Fenced once it is not; StoreFailed.
        """

        def delete(name: str) -> None:
            _check(generation, is_newest)
            reading(lambda: self._store.delete(name), self._clock)

        _check(generation, is_newest)
        entries = reading(self._store.list, self._clock)
        by_name, damages, _ = records_in(entries, self._store, self._clock)
        unclear = {damage.step for damage in damages}
        present = {(entry.name, entry.size_bytes) for entry in entries}
        # Counting checkpoints of another run, whose steps may be far higher, would delete ours, and
        # so would counting one without its payload.
        ours = {name: each for name, each in by_name.items() if each.run_id == self._policy.run_id}
        whole = [each for each in ours.values() if (each.payload, each.size_bytes) in present]
        counting = may_count(whole, step=step, generation=generation, resumed_from=resumed_from)
        steps = sorted(counting)[: -self._policy.keep]
        oldest_kept = min(counting - set(steps), default=0)
        names = {entry.name for entry in entries}
        # Steps all of whose records name payloads that are gone.
        useless = {each.step for each in ours.values() if each.payload not in names}
        useless -= {each.step for name, each in by_name.items() if name not in ours or each.payload in names}
        useless = {each for each in useless - unclear if each < oldest_kept}
        deleted = _names_of({*steps, *useless}, names - (by_name.keys() - ours.keys()), ours.values())
        for name in deleted:
            delete(name)
        self._sweep(names - {*deleted}, list(by_name.values()), generation, delete)
        return steps

    def _sweep(
        self,
        names: AbstractSet[str],
        records: list[CommitRecord],
        generation: int,
        delete: Callable[[str], None],
    ) -> None:
        found = {name: parsed for name in names if (parsed := parse_name(name)) and parsed.attempt}
        named = _attempts_of(records)
        uncommitted = {each.attempt: each.generation for each in found.values() if each.attempt not in named}
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
            gone, unclear = set(abandoned) - _attempts_of(records), {damage.step for damage in damages}
            for name, each in sorted(found.items()):
                if each.attempt in gone and each.step not in unclear:
                    delete(name)


def _names_of(steps: AbstractSet[int], names: AbstractSet[str], records: Iterable[CommitRecord]) -> list[str]:
    """The commit records of these steps and the payloads that they name, in the order to delete.

    Of each step the records come first: a crash then leaves a payload without a record, which is
    not a checkpoint. In the other order it would leave a checkpoint that does not load. An attempt
    that no record names may be another writer's, who is about to commit it: it is left to the
    sweep. A record that does not parse goes with its step.
    """
    named = _attempts_of(records)
    found = [
        (parsed.step, parsed.number is None, name)
        for name in names
        if (parsed := parse_name(name))
        and parsed.step in steps
        and (parsed.number is not None or parsed.attempt in named)
    ]
    return [name for _, _, name in sorted(found)]


def _check(generation: int, is_newest: Callable[[], bool]) -> None:
    if not is_newest():
        raise Fenced(f"generation {generation} is not the newest: a newer one deletes old checkpoints")


def _attempts_of(records: Iterable[CommitRecord]) -> set[str]:
    return {record.payload.rpartition("/")[0] for record in records}


def may_count(
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
        if written_by < generation and now - first_seen[attempt] > 2 * save_deadline_s
    )
