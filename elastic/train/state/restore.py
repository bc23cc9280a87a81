"""Training resumes from the newest state that any node has, and every rank has the same state.

All ranks report what is available, and restore_order.py puts it in order. The best candidate is
brought to the ranks that lack it (spread_state.py), each rank loads it onto its own device, and all
compare checksums of what they loaded. A candidate that is damaged on any rank is reported, and the
next one is tried; a checkpoint that is gone since the listing made way for a newer one, so the
storage is listed again. One that is whole and does not fit the recipe's objects ends the restore:
nothing is gained by an older one of the same objects.

If any state was found, a snapshot or a commit record, and none loads, that is an error: a run never
starts over silently. A candidate that fails half-way leaves objects with its numbers in them, and
step 1 must not begin from those.

A storage that does not answer is not damage. Rank 0 asks it again for a minute and then fails,
which ends the restore on every rank: no rank goes on to an older checkpoint.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from elastic.checkpoint.catalog import (
    MOST_LISTINGS,
    Damage,
    commits_of_step,
    list_commits,
    of_run,
)
from elastic.checkpoint.record import CommitRecord
from elastic.data import record
from elastic.data.record import DataRecord
from elastic.divergence import Divergence
from elastic.errors import (
    CheckpointDamaged,
    ElasticError,
    NothingLoads,
    StateDoesNotFit,
    StoreFailed,
    UsageError,
)
from elastic.events import CheckpointRejected, SnapshotRejected
from elastic.faults.inject import WorkerFaults
from elastic.inherit.inherit import Inheritance
from elastic.observe import step_line
from elastic.observe.log import EventLog, parse_lines
from elastic.observe.step_line import StepLine
from elastic.proof.agreement import Comparison
from elastic.proof.evidence import NOTHING, Earlier, Evidence
from elastic.snapshot import image
from elastic.storage.store import Answer, Store, retrying
from elastic.system.clock import Clock
from elastic.train.groups import ProcessGroups
from elastic.train.state import restore_reasons
from elastic.train.state.candidates import (
    AvailableStates,
    Candidate,
    RejectedState,
    check_none_is_missing,
    is_void,
    newest_divergence,
    order_candidates,
    with_one_again,
)
from elastic.train.state.flat import FlatState
from elastic.train.state.local_snapshots import LocalSnapshots
from elastic.train.state.spread import Copy, read_copy, spread
from elastic.train.state.state import State

STORAGE_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where training resumes; step 0 is the start.

    source: snapshot (every rank had it in its node's memory), peer (some got it from another
    node's), checkpoint, parent (the state of another run), or none. line: the step's line of the
    metrics, if a snapshot kept it. data: what it was trained on, None where earlier code saved it.
    divergence: the difference between ranks because of which steps are done again.
    digest: of the checkpoint, if it was one. checksum: of the whole state, as the objects have it.
    has_older: an older checkpoint than this state is committed. doubt: why a newer state was
    given up, where steps before it may be wrong as well.
    """

    step: int
    chain: str
    source: str
    line: StepLine | None = None
    data: DataRecord | None = None
    divergence: Divergence | None = None
    digest: str = ""
    checksum: str = ""
    has_older: bool = False
    doubt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What one rank reports of a candidate: what is wrong, and what the others must know.

    misfit: why the state, which is whole, is not that of this rank's objects. state: the checksum
    of what it loaded. line: of the metrics, as JSON.
    """

    problem: str
    misfit: str = ""
    state: str = ""
    line: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """Finds and loads the state that training resumes from.

    run_id, run_url: of the run whose checkpoints may be used, and where it is. failures,
    divergence: as in `AvailableStates`. log: on rank 0 alone. committed_step: of the newest
    checkpoint that the group knows of; training never goes on from an older state where that one is
    missing. inheritance: of a run that begins from another one.
    """

    groups: ProcessGroups
    store: Store
    local: LocalSnapshots
    comparison: Comparison
    run_id: str
    run_url: str
    failures: int
    divergence: Divergence | None
    log: EventLog | None
    clock: Clock
    faults: WorkerFaults | None
    committed_step: int = 0
    inheritance: Inheritance | None = None

    def restore(self, state: State, again: Earlier = NOTHING) -> ResumePoint:
        """Load the newest state that loads; once in the life of this object.

        again: the step that is to be done again, for which the state before it is loaded where both
        are in memory.

        A state that was just built is loaded as well, into the objects that hold it: what a load
        does to them is then the same in all generations.

        Raises NothingLoads, StateDoesNotFit, UsageError, StatesDiffer, RecipeNotExact or PeerLost;
        StoreFailed on rank 0.
        """
        try:
            return self._restored(state, again)
        finally:
            self.local.close()

    def _restored(self, state: State, again: Earlier) -> ResumePoint:
        available = self.groups.all_gather(self._available())
        known = newest_divergence(available)
        candidates, rejected = order_candidates(available)
        candidates = with_one_again(candidates, again.step)
        for each in rejected:
            self._report(each)
        check_none_is_missing(self.committed_step, candidates, rejected, self.run_url)
        tried: list[Candidate] = []
        while untried := [each for each in candidates if each not in tried]:
            found = self._try(untried[0], state, known)
            if isinstance(found, ResumePoint):
                return self._resumed(found, candidates, rejected, again)
            tried.append(untried[0])
            refused = [RejectedState(step=tried[-1].step, reason=found, is_stored=tried[-1].is_stored)]
            if tried[-1].is_stored and len(tried) <= MOST_LISTINGS:
                # It may have been deleted since the listing, because a newer one was committed.
                candidates, now_refused = order_candidates(self.groups.all_gather(self._available()))
                refused += [each for each in now_refused if each not in rejected]
            for each in refused:
                self._report(each)
            rejected += refused
        _check_nothing_found(available, known, restore_reasons.listed(rejected, self.run_url))
        chain, source = "", "none"
        if self.inheritance is not None:
            self.inheritance.load(state, self.groups, self.clock)
            chain, source = self.inheritance.parent.digest, "parent"
        built = state.load_as_built()
        self._fault_point()
        self.comparison.check_same_state(built, step=0, known=known)
        self.local.discard_newer(0)
        return ResumePoint(step=0, chain=chain, source=source, divergence=known, checksum=built.whole)

    def _resumed(
        self,
        found: ResumePoint,
        candidates: list[Candidate],
        rejected: list[RejectedState],
        again: Earlier,
    ) -> ResumePoint:
        # A step that is compared counts no more; but a node that left may wait for its state.
        keeps_it = again.step == found.step + 1 and len(again.found) == 1 and not again.is_rehearsal
        self.local.discard_newer(again.step if keeps_it else found.step)
        has_older = any(each.is_stored and each.step < found.step for each in candidates)
        doubts = [each for each in rejected if each.is_suspect and each.step > found.step]
        doubt = f"step {doubts[0].step} was given up: {doubts[0].reason}" if doubts else ""
        return replace(found, has_older=has_older, doubt=doubt)

    def _available(self) -> AvailableStates:
        found = AvailableStates(
            failures=self.failures,
            divergence=self.divergence,
            snapshots=self.local.offers,
            damaged=tuple(self.local.damaged),
        )
        if self.groups.rank != 0:
            return found
        listed, damages = self._asked(self._commits)
        records, of_all = of_run((listed, damages), self.run_id)
        rejected = tuple(
            RejectedState(step=each.step, reason=each.reason, is_stored=True, is_foreign=each not in damages)
            for each in of_all
        )
        return replace(found, records=tuple(records), damaged=found.damaged + rejected)

    def _commits(self) -> tuple[list[CommitRecord], list[Damage]]:
        records, damages = list_commits(self.store, self.clock)
        step, ours = self.committed_step, [each for each in records if each.run_id == self.run_id]
        if step > max([each.step for each in ours] + [each.step for each in damages], default=0):
            # A listing of an object store may be old; a reading by name is not.
            named, damaged = commits_of_step(self.store, step, self.clock)
            records = [*(each for each in named if each not in records), *records]
            damages = [*(each for each in damaged if each not in damages), *damages]
        return records, damages

    def _try(self, candidate: Candidate, state: State, known: Divergence | None) -> ResumePoint | str:
        """Load a candidate on every rank; or what is wrong with it on the first rank that fails.

        All ranks return alike, because they decide by what they gathered.
        """
        groups = self.groups
        own = self._own_copy(candidate)
        data, problem = own.data, own.problem
        if len(candidate.ranks) < groups.world_size:
            found_or_problem = spread(groups, own)
            if isinstance(found_or_problem, str):
                return found_or_problem
            data = found_or_problem
        elif own.memory is not None:
            own.memory.close()
        assert data is not None or problem
        chain, trained_on, found = "", None, Evidence({})
        refused = _Report(problem="")
        if data is not None and not problem:
            try:
                chain, trained_on, found = _load(data, state)
            except (StateDoesNotFit, UsageError) as error:
                refused = _Report(problem="", misfit=str(error))
            except (ElasticError, OSError, LookupError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
        self._fault_point()
        loaded = groups.all_gather(
            replace(refused, problem=problem, state=found.whole, line=self._line(candidate))
        )
        if problems := [each.problem for each in loaded if each.problem]:
            return problems[0]
        if misfits := [each for each in loaded if each.misfit]:
            # Older states are of the same objects: they would not fit either, and if one did, steps
            # would be lost without need.
            raise StateDoesNotFit(restore_reasons.does_not_fit(candidate, misfits[0].misfit, self.run_url))
        if len({each.state for each in loaded}) > 1:
            self.comparison.check_same_state(found, step=candidate.step, known=known)
        lines = (each.line.encode() for each in loaded if each.line is not None)
        line = next(parse_lines(lines, step_line.parse), None)
        from_memory = "snapshot" if len(candidate.ranks) == groups.world_size else "peer"
        source = "checkpoint" if candidate.is_stored else from_memory
        return ResumePoint(
            step=candidate.step,
            chain=chain,
            source=source,
            line=line,
            data=trained_on,
            divergence=known,
            digest="" if candidate.record is None else candidate.record.digest,
            checksum=found.whole,
        )

    def _own_copy(self, candidate: Candidate) -> Copy:
        """Raises StoreFailed."""
        if self.groups.rank not in candidate.ranks:
            return Copy()
        if candidate.record is None:
            try:
                return Copy(data=self.local.image(candidate.step))
            except CheckpointDamaged as error:
                return Copy(problem=str(error))
        try:
            return self._asked(partial(read_copy, self.store, candidate.record, self.clock))
        except StoreFailed as error:
            raise StoreFailed(
                f"the checkpoint of step {candidate.step} is committed and cannot be read ({error}). No older one is used in its place:"
                f" give the same command again, or, if it stays unreadable, move its folder out of checkpoints/ and remove rendezvous/"
                " (with etcd or c10d, give another --rdzv-id)"
            ) from error
        except (CheckpointDamaged, OSError) as error:
            return Copy(problem=f"{type(error).__name__}: {error}")

    def _asked(self, call: Callable[[], Answer]) -> Answer:
        """The storage's answer to `call`. Raises StoreFailed if it stays away."""
        return retrying(call, clock=self.clock, deadline=self.clock.monotonic() + STORAGE_PATIENCE_S)

    def _line(self, candidate: Candidate) -> str | None:
        is_mine = not candidate.is_stored and self.groups.rank in candidate.ranks
        line = self.local.line(candidate.step) if is_mine else None
        return None if line is None else json.dumps(line)

    def _fault_point(self) -> None:
        """Here a rank has loaded a state, or starts without one, and no other rank knows yet."""
        if self.faults is not None:
            self.faults.at_restore()

    def _report(self, rejected: RejectedState) -> None:
        if self.log is None:
            return
        event = CheckpointRejected if rejected.is_stored else SnapshotRejected
        self.log.record(event(step=rejected.step, reason=rejected.reason))
        kind = "checkpoint" if rejected.is_stored else "snapshot"
        print(f"{kind} step={rejected.step} is not used ({rejected.reason}); trying the next older state")


def _check_nothing_found(available: list[AvailableStates], known: Divergence | None, reasons: str) -> None:
    """Raises NothingLoads if there was a state to load."""
    damaged = [each for of_rank in available for each in of_rank.damaged]
    num_checkpoints = sum(len(each.records) for each in available) + sum(each.is_stored for each in damaged)
    num_snapshots = sum(_has_snapshots(each, known) for each in available)
    found = f"{num_snapshots} of {len(available)} ranks have snapshots, no checkpoint is committed,"
    if num_checkpoints:
        found = f"{num_checkpoints} checkpoints are committed"
    if num_checkpoints + num_snapshots:
        raise NothingLoads(f"{found} and none of them loads: {reasons}")


def _has_snapshots(of_rank: AvailableStates, known: Divergence | None) -> bool:
    """Whether there is one that counts, also if its bytes changed since."""
    is_damaged = any(not each.is_stored for each in of_rank.damaged)
    return is_damaged or not all(is_void(each, known) for each in of_rank.snapshots)


def _load(data: Tensor, state: State) -> tuple[str, DataRecord | None, Evidence]:
    """(chain, data, checksum) of the state that the objects now have. Raises CheckpointDamaged."""
    tensors, document = image.read(data.numpy().data, copy=False)
    saved = FlatState.read(tensors, document)
    checksum = state.load(saved)
    return str(document["chain"]), _trained_on(document.get("data", "")), checksum


def _trained_on(text: str) -> DataRecord | None:
    try:
        return record.parse(text) if text else None
    except ValueError as error:
        raise CheckpointDamaged(str(error)) from error
