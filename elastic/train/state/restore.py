"""Training resumes from the newest state that any node has, and every rank has the same state.

All ranks report their states, and candidates.py puts them in order. The best candidate is
brought to the ranks that lack it (spread.py), each rank loads it onto its own device, and all
compare checksums of what they loaded. A candidate that is damaged on any rank is reported, and all
ranks report their states once more: a snapshot may be intact in another node's memory, and a
checkpoint that is gone has made way for a newer one. A whole state that does not fit the
recipe's objects ends the restore: nothing is gained by an older one of the same objects.

If any state was found, a snapshot or a commit record, and none loads, that is an error: a run never
starts over silently. A candidate that fails half-way leaves objects with its numbers in them, and
step 1 must not begin from those.

A storage that does not answer is not damage. A rank that reads asks it again for a minute and then
fails, which ends the restore on every rank: no rank goes on to an older checkpoint.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.payload_check import read_state
from elastic.checkpoint.record import CommitRecord
from elastic.config.identity import new_run_from
from elastic.data import record
from elastic.data.record import DataRecord
from elastic.divergence import Divergence, vote_of
from elastic.errors import CheckpointDamaged, ElasticError, StateDoesNotFit, StoreFailed, UsageError
from elastic.events import CheckpointRejected, SnapshotRejected
from elastic.observe import step_line
from elastic.observe.log import parse_lines
from elastic.proof.evidence import NOTHING, Earlier, Evidence
from elastic.snapshot import checksum, image
from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.storage.store import Answer, retrying
from elastic.system.sealed_memory import SealedMemory
from elastic.train.loop.build import LoopParts
from elastic.train.sharded.regroup import Read, regroup, regroup_stored
from elastic.train.state.candidates import (
    AvailableStates,
    Candidate,
    OfferedSnapshot,
    RejectedState,
    check_none_is_missing,
    check_nothing_found,
    newest_divergence,
    order_candidates,
)
from elastic.train.state.flat import FlatState, state_evidence
from elastic.train.state.inherit import STORAGE_PATIENCE_S, inherit
from elastic.train.state.spread import Copy, copy_in, spread
from elastic.train.state.state import State

MOST_TRIES = 100  # while other nodes commit and delete


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where training resumes; step 0 is the start.

    source: snapshot (every rank had of it in its node's memory), peer (some got it from another
    node's), checkpoint, parent (the state of another run), or none. line: the step's line of the
    metrics, if a snapshot kept it. data: what it was trained on, None at the start. divergence: the
    difference between ranks that has steps done again. digest: of the checkpoint, if it was one.
    checksum: of the whole evidence, as the objects have it.
    """

    step: int
    chain: str
    source: str
    line: step_line.StepLine | None = None
    data: DataRecord | None = None
    divergence: Divergence | None = None
    digest: str = ""
    checksum: str = ""


class Restorer:
    """Finds and loads the state that training resumes from; once in the life of this object.

    Where `link` knows of a newer checkpoint than all that can be found, training never goes on from
    an older state.
    """

    def __init__(self, parts: LoopParts) -> None:
        memory = parts.link.memory
        self._parts, self._groups, self._link = parts, parts.groups, parts.link
        self._slots = SnapshotSlots.open(memory) if memory else None
        # Which snapshots failed is remembered, so that a run without another state is refused.
        self._damaged: list[RejectedState] = []
        self._spoiled: set[tuple[int, int]] = set()  # (seq of a snapshot, part)

    def restore(self, again: Earlier = NOTHING) -> ResumePoint:
        """Load the newest state that loads.

        again: the step that is to be done again, for which the state before it is loaded where it
        is kept.

        A state that was just built is loaded as well, into the objects that hold it: what a load
        does to them is then the same in all generations.

        Raises NothingLoads, StateDoesNotFit, UsageError, StatesDiffer, RecipeNotExact or PeerLost;
        StoreFailed on rank 0.
        """
        try:
            return self._restored(again)
        finally:
            # If the state outgrows the memory, the agent makes larger slots, and these would stay
            # for as long as one worker has them open.
            if self._slots is not None:
                self._slots.close()

    def _restored(self, again: Earlier) -> ResumePoint:
        tried: list[Candidate] = []
        rejected: list[RejectedState] = []
        while True:
            available = self._groups.all_gather(self._available())
            known = newest_divergence(available)
            candidates, refused = order_candidates(available, again.step)
            self._reject(rejected, refused)
            check_none_is_missing(self._link.committed_step, candidates, rejected, self._parts.run_dir.url)
            untried = [each for each in candidates if each not in tried]
            if not untried or len(tried) == MOST_TRIES:
                check_nothing_found(rejected, self._parts.run_dir.url)
                return self._start(known)
            tried.append(untried[0])
            found = self._try(untried[0], known)
            if isinstance(found, ResumePoint):
                break
            self._reject(rejected, [untried[0].rejected(found)])
        # A node that left has ended the generation after `again.step`; its agent may wait until the
        # snapshot of that step is committed, which is kept for it.
        keeps_it = again.step == found.step + 1 and len(again.found) == 1 and not again.is_rehearsal
        self._discard_newer(again.step if keeps_it else found.step)
        return found

    def _start(self, known: Divergence | None) -> ResumePoint:
        chain, source, parent = "", "none", self._parts.identity.parent
        if parent is not None:
            inherit(self._parts, parent)
            chain, source = parent.digest, "parent"
        built = self._parts.state.load_as_built()
        if self._parts.state.sharded is not None:
            built = self._parts.state.evidence()
        self._fault_point()
        self._parts.comparison.check_same_state(built, step=0, known=known)
        self._discard_newer(0)
        return ResumePoint(step=0, chain=chain, source=source, divergence=known, checksum=built.whole)

    def _available(self) -> AvailableStates:
        offered = tuple(map(self._offered, self._snapshots().values()))
        known, damaged = self._link.divergence, tuple(self._damaged)
        found = AvailableStates(divergence=known, snapshots=offered, damaged=damaged)
        if self._groups.rank != 0:
            return found
        store, clock, run_id = self._parts.checkpoints, self._parts.clock, self._parts.identity.run_id
        records, damages = self._asked(lambda: list_commits(store, clock, run_id=run_id))
        rejected = (RejectedState(step=each.step, reason=each.reason, is_stored=True) for each in damages)
        return replace(found, records=tuple(records), damaged=(*damaged, *rejected))

    def _offered(self, snapshot: Snapshot) -> OfferedSnapshot:
        """Without parts that turned out to be damaged."""
        info, numbers = snapshot.info, [each.number for each in snapshot.images]
        parts = tuple(each for each in numbers if (snapshot.seq, each) not in self._spoiled)
        return OfferedSnapshot(
            step=info.step, checksum=info.checksum, generation=info.generation, of=info.of, parts=parts
        )

    def _try(self, candidate: Candidate, known: Divergence | None) -> ResumePoint | str:
        """Load a candidate on every rank; or its problem on the first rank that fails.

        All ranks return alike, because they decide by what they gathered.
        """
        groups, step, run_url = self._groups, candidate.step, self._parts.run_dir.url
        state, is_cut = self._parts.state, self._parts.state.sharded is not None
        if is_cut or len(candidate.holders) > 1:
            read: Read | Tensor | str = self._regrouped(candidate)
        else:
            read = spread(groups, self._own_copy(candidate))
        if isinstance(read, str):
            return read
        misfit, damage, chain, trained_on, found = "", "", "", None, Evidence({})
        saved = FlatState(tensors={}, document={})
        try:
            tensors, document = read if isinstance(read, tuple) else image.read(read.numpy().data)
            saved = FlatState.read(tensors, document)
            chain, trained_on, found = _load(saved, document, state)
        except (StateDoesNotFit, UsageError) as error:
            misfit = str(error)
        except (ElasticError, OSError, LookupError, TypeError) as error:
            damage = f"{type(error).__name__}: {error}"
        self._fault_point()
        kept = None if candidate.is_stored else self._snapshots().get(step)
        line = "" if kept is None or kept.info.line is None else json.dumps(kept.info.line)
        loaded = groups.all_gather([damage, misfit, line, str(vote_of(found.whole))])
        told: Iterable[tuple[str, ...]] = zip(*loaded, strict=True)
        damages, misfits, lines, votes = ([each for each in of_ranks if each] for of_ranks in told)
        if damages:
            return damages[0]
        if misfits:
            # Older states are of the same objects: they would not fit either, and if one did, steps
            # would be lost without need.
            reason = " ".join(misfits[0].split()).rstrip(".")  # torch's own have a line for each parameter
            kind = "checkpoint" if candidate.is_stored else "snapshot"
            raise StateDoesNotFit(
                f"the {kind} of step {step} does not fit what the recipe builds: {reason}. "
                "Put the recipe back and give the same command, or begin a new run with the entries that fit: "
                f"{new_run_from(run_url, entries='NAME')}"
            )
        comparison = self._parts.comparison
        if is_cut:  # what the load has found is of this rank's rows
            checksum = state.checksum()
            are_same = saved.about.get("sharded") == state.flatten().about["sharded"]
            if are_same and candidate.checksum not in ("", state_evidence(saved, checksum).whole):
                return "what was loaded is not the state that was saved"
            found = state_evidence(state.flatten(), checksum)
            comparison.check_same_state(found, step=step, known=known)
        else:
            comparison.check_votes(list(map(int, votes)), found, step=step, known=known)
        from_memory = "snapshot" if len(candidate.ranks) == groups.world_size else "peer"
        return ResumePoint(
            step=step,
            chain=chain,
            source="checkpoint" if candidate.is_stored else from_memory,
            line=next(parse_lines((each.encode() for each in lines), step_line.parse), None),
            data=trained_on,
            divergence=known,
            digest="" if candidate.record is None else candidate.record.digest,
            checksum=found.whole,
        )

    def _own_copy(self, candidate: Candidate) -> Copy:
        """Raises StoreFailed."""
        if self._groups.rank not in candidate.ranks:
            return Copy()
        try:
            if candidate.record is None:
                return Copy(data=torch.frombuffer(self._image(candidate.step, 0), dtype=torch.uint8))
            return copy_in(self._stored(candidate.record, 0))
        except (CheckpointDamaged, OSError) as error:
            return Copy(problem=str(error))

    def _regrouped(self, candidate: Candidate) -> Read | str:
        """Raises StoreFailed."""
        groups, state, step, record = self._groups, self._parts.state, candidate.step, candidate.record
        if record is not None:
            return regroup_stored(groups, state, record, partial(self._stored, record))
        holders = [of_part[number % len(of_part)] for number, of_part in enumerate(candidate.holders)]
        return regroup(groups, state, holders, partial(self._image, step))

    def _stored(self, record: CommitRecord, number: int) -> SealedMemory:
        """A part of a checkpoint. Raises CheckpointDamaged, OSError, StoreFailed."""
        store, clock = self._parts.checkpoints, self._parts.clock
        try:
            return self._asked(partial(read_state, store, record.payloads[number], clock))
        except StoreFailed as error:
            raise StoreFailed(
                f"the checkpoint of step {record.step} is committed and cannot be read ({error}). No older one is used in its place:"
                f" give the same command again, or, if it stays unreadable, move its folder out of checkpoints/ and remove rendezvous/"
                " (with etcd or c10d, give another --rdzv-id)"
            ) from error

    def _snapshots(self) -> dict[int, Snapshot]:
        """Those in this node's memory that are agreed on, by step, newest first.

        Of one step the last published, which comes last here.
        """
        whole = [] if self._slots is None else self._slots.whole()
        ordered = sorted(whole, key=lambda each: (-each.info.step, each.seq))
        return {each.info.step: each for each in ordered if each.is_agreed}

    def _image(self, step: int, number: int) -> memoryview:
        """A part of a snapshot, a view of the slot: valid until the next snapshot is written.

        Raises CheckpointDamaged when it is not what was written.
        """
        snapshot = self._snapshots().get(step)
        if self._slots is not None and snapshot is not None:
            body = self._slots.body(snapshot.slot)
            for part in snapshot.images:
                found = body[part.start : part.end]
                if part.number == number and checksum.of_image(found) == part.checksum:
                    return found
            if snapshot.info.parts:
                self._spoiled.add((snapshot.seq, number))
            else:
                self._slots.invalidate(snapshot.slot)
        reason = "its bytes changed in memory after it was written"
        self._damaged.append(RejectedState(step=step, reason=reason, is_stored=False))
        raise CheckpointDamaged(reason)

    def _discard_newer(self, step: int) -> None:
        """Training resumes from `step`: newer snapshots belong to steps that will be done again."""
        if self._slots is not None:
            self._slots.discard_newer(step)

    def _asked(self, call: Callable[[], Answer]) -> Answer:
        """The storage's answer to `call`. Raises StoreFailed if it stays away."""
        clock = self._parts.clock
        return retrying(call, clock=clock, deadline=clock.monotonic() + STORAGE_PATIENCE_S)

    def _fault_point(self) -> None:
        """Here a rank has loaded a state, or starts without one, and no other rank knows yet."""
        if self._parts.faults is not None:
            self._parts.faults.at_restore()

    def _reject(self, rejected: list[RejectedState], refused: list[RejectedState]) -> None:
        """Add newly refused states, and report them."""
        new = [each for each in refused if each not in rejected]
        rejected += new
        if self._parts.output is None:
            return
        for each in new:
            event = CheckpointRejected if each.is_stored else SnapshotRejected
            self._parts.output.log.record(event(step=each.step, reason=each.reason))
            print(f"{each} is not used ({each.reason}); trying another one")


def _load(saved: FlatState, document: Any, state: State) -> tuple[str, DataRecord, Evidence]:
    """Give the objects a state; the (chain, data, evidence) of its image's document.

    Raises CheckpointDamaged, and as `State.load`.
    """
    try:
        chain, trained_on = str(document["chain"]), record.parse(document["data"])
    except (KeyError, ValueError) as error:
        raise CheckpointDamaged(f"expected a state as this version saves it, found none ({error})") from error
    return chain, trained_on, state.load(saved)
