"""A run begins from a state of its parent that verifies, and keeps to it ever after.

The state is chosen once, before the first write, and run.json records it. From then on the recorded
one counts: the parent may train on meanwhile, or be gone. It does not promise that the state fits
the recipe, which is seen where it is loaded (train/state/inherit.py).
"""

from collections.abc import Callable
from contextlib import suppress

from elastic.checkpoint.catalog import Damage, list_commits
from elastic.checkpoint.payload_check import check_state, digest_of
from elastic.checkpoint.record import CommitRecord
from elastic.config.identity import FORM, NAME, Identity, Origin, Parent, parse
from elastic.config.run_dir import RunDir
from elastic.errors import CheckpointDamaged, StoreFailed, UsageError
from elastic.storage.remote import open_store
from elastic.storage.store import Store, read_small
from elastic.system.clock import Clock
from elastic.system.untrusted import printable

Reading = Callable[[Store, CommitRecord, Clock], None]


def parent_of(
    recorded: Identity | None, origin: Origin | None, run: RunDir, clock: Clock, report: Callable[[str], None]
) -> Parent | None:
    """The parent of a run that is begun or resumed with `--from origin`, or without it.

    recorded: what run.json has, None for a new run. report: takes a line about each state that is
    passed over. Raises UsageError for a state that cannot be had, and where the run began
    otherwise.
    """
    if origin is not None and origin.run_dir.url == run.url:
        raise UsageError(
            f"expected the new run in another directory than its parent's, found {run.url} for both; give --run-dir NEW"
        )
    if recorded is None:
        return None if origin is None else find(origin, clock, report)
    there = recorded.parent
    if origin is not None and (there is None or not _is_same(there, origin)):
        began = "began without --from" if there is None else f"began from {there}"
        raise UsageError(
            f"{run.url} holds a run that {began}; found --from {origin}. Resume it without --from, take another --run-dir, "
            "or set a folder aside with --fresh"
        )
    return there


def find(
    origin: Origin,
    clock: Clock,
    report: Callable[[str], None],
    asks: str = "--from",
    read: Reading = check_state,
) -> Parent:
    """The state that `origin` names. Without a step: the newest that verifies.

    asks: the option or command that wants it. read: reads the payload of a candidate, and raises
    CheckpointDamaged where it does not verify.
    """
    url = origin.run_dir.url
    try:
        data = read_small(open_store(url), NAME, clock)
        if data is None:
            raise UsageError(
                f"expected a run at {url}, found none; {asks} takes {FORM}, with RUN as --run-dir named it (a script without elastic is none)"
            )
        there = parse(data, remedy=f"{asks} cannot read {url}")
        record, steps, damages = _chosen(origin, there.run_id, clock, read)
    except StoreFailed as error:
        raise UsageError(f"expected to read the run at {url}, found: {error}") from error
    if record is None:
        raise UsageError(_not_found(origin, steps, damages, asks))
    for each in damages:
        if each.step >= record.step:
            report(printable(f"step {each.step} of {url} is not used: {each.reason}"))
    try:
        digest = digest_of(open_store(origin.run_dir.checkpoints_url), record, clock)
    except (CheckpointDamaged, StoreFailed) as error:
        raise UsageError(f"expected to read the run at {url}, found: {error}") from error
    return Parent(
        run_id=there.run_id,
        url=url,
        step=record.step,
        digest=digest,
        entries=origin.entries,
        ancestors=() if there.parent is None else there.parent.lineage,
    )


def record_of(parent: Parent, store: Store, clock: Clock) -> CommitRecord:
    """The commit record of the state that a run began from, in the parent's checkpoints.

    Raises UsageError when it is gone, StoreFailed.
    """
    records, _ = list_commits(store, clock, run_id=parent.run_id)
    for each in records:
        with suppress(CheckpointDamaged):
            if each.step == parent.step and digest_of(store, each, clock) == parent.digest:
                return each
    raise UsageError(
        f"expected {parent}, from which this run begins, found that it is no longer there; "
        "take another state with --from, and another --run-dir"
    )


def _is_same(there: Parent, origin: Origin) -> bool:
    """Whether `origin` names the recorded parent, which may be gone."""
    is_step = origin.step in (None, there.step)
    return is_step and (origin.entries, origin.run_dir.url) == (there.entries, there.url)


def _chosen(
    origin: Origin, run_id: str, clock: Clock, read: Reading
) -> tuple[CommitRecord | None, list[int], list[Damage]]:
    """The record, or None; with the steps that are committed, and the damage among those asked for.

    A state that the parent's retention deletes while it is read counts as damaged. Raises
    StoreFailed.
    """
    store = open_store(origin.run_dir.checkpoints_url)
    records, damages = list_commits(store, clock, run_id=run_id)
    steps = sorted({each.step for each in records})
    damages = [each for each in damages if origin.step in (None, each.step)]
    for record in records:
        if origin.step in (None, record.step):
            try:
                read(store, record, clock)
            except CheckpointDamaged as error:
                damages.append(Damage(step=record.step, reason=str(error)))
            else:
                return record, steps, damages
    return None, steps, damages


def _not_found(origin: Origin, steps: list[int], damages: list[Damage], asks: str) -> str:
    url, step = origin.run_dir.url, origin.step
    if damages:
        reasons = "; ".join(f"step {each.step}: {each.reason}" for each in damages)
        return (
            f"expected {'a state' if step is None else f'step {step}'} of {url} that verifies, found damage ({reasons}); "
            f"elastic-train verify {url} lists which steps are whole"
        )
    committed = f"the steps {', '.join(map(str, steps))}" if steps else "none"
    return f"expected {'a committed state' if step is None else f'step {step}'} of {url}, found {committed}; {asks} takes {FORM}"
