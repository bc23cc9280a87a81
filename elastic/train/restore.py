"""Training goes on from the newest state that anybody has, loaded by every rank and, on every rank, the same afterwards.

All tell what they have; restore_order.py orders it; one rank that has the best candidate sends it to those that lack it, each loads it onto its own device. A candidate
that fails anywhere is reported, and the next older one is tried. If commit records exist and none loads, that is an error: nobody starts over silently.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from elastic.checkpoint.catalog import committed, of_run, read_payload
from elastic.checkpoint.record import CommitRecord
from elastic.errors import CheckpointDamaged, ElasticError, NothingLoads, StoreFailed
from elastic.events import CheckpointRejected, SnapshotRejected
from elastic.observe.log import EventLog
from elastic.snapshot import checksum, image, safetensors_header
from elastic.snapshot.slots import Snapshot, SnapshotSlots
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.train.consistency import check_same_checksums, check_same_state
from elastic.train.process_groups import ProcessGroups
from elastic.train.restore_order import AvailableStates, Candidate, RejectedState, Tier, order_candidates
from elastic.train.state import FlatState, State, checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """What is known about the state that training goes on from; step 0 is the start.

    `source`: snapshot (every rank had it in its node's memory), peer (some got it from another node's), checkpoint, or none.
    `line`: its line of the metrics, where the memory kept it.
    """

    step: int
    chain: str
    source: str
    line: dict[str, Any] | None = None


class LocalSnapshot:
    """What this rank's node has in memory: the newest snapshot that is what it was when it was written."""

    def __init__(self, area: SnapshotSlots | None) -> None:
        self._area = area
        self.snapshot: Snapshot | None = None
        self.problems: list[str] = []
        for snapshot in () if area is None else area.whole():
            assert area is not None
            if (
                checksum.of_image(area.body(snapshot.slot)[: snapshot.size_bytes])
                == snapshot.about["checksum"]
            ):
                self.snapshot = snapshot
                break
            self.problems.append(
                f"the snapshot of step {snapshot.about['step']} changed in memory after it was written; it is not used"
            )
            area.forget(snapshot.slot)

    @property
    def about(self) -> dict[str, Any]:
        assert self.snapshot is not None
        return self.snapshot.about

    @property
    def image(self) -> Tensor:
        """uint8 [n], in place: valid as long as nobody writes snapshots."""
        assert self._area is not None
        assert self.snapshot is not None
        return torch.frombuffer(
            self._area.body(self.snapshot.slot), dtype=torch.uint8, count=self.snapshot.size_bytes
        )

    def forget_unless(self, step: int) -> None:
        """What is newer than the state that everybody went on from must never be found again."""
        if self._area is not None:
            for snapshot in self._area.whole():
                if snapshot.about["step"] > step:
                    self._area.forget(snapshot.slot)


def restore(  # noqa: PLR0913 - every place that a state can come from
    world: ProcessGroups,
    store: Store,
    kept: LocalSnapshot,
    state: State,
    *,
    run_id: str,
    failures: int,
    log: EventLog | None,
    clock: Clock,
    reached: Callable[[], None] | None = None,
) -> ResumePoint:
    """run_id: whose checkpoints may be used. failures: consecutive ones without a new step that may lie in the state. Raises NothingLoads, StatesDiffer or PeerLost. `log` is rank 0's.

    reached: called when this rank has loaded a state, or has to begin without one, and nobody knows yet; faults can be injected there.
    """
    claims = [_parse(said) for said in world.gather(asdict(_claim(world, store, kept, run_id, clock)))]
    candidates, rejected = order_candidates(claims, failures)
    for refused in rejected:
        _report(log, refused)
    for candidate in candidates:
        loaded, problem = _try(world, store, kept, state, candidate, clock, reached=reached)
        if loaded is not None:
            kept.forget_unless(loaded.step)
            return loaded
        _report(log, RejectedState(step=candidate.step, tier=candidate.tier, reason=problem))
    if any(claim.records or claim.damaged for claim in claims):
        count = sum(len(claim.records) + len(claim.damaged) for claim in claims)
        raise NothingLoads(
            f"{count} checkpoints are committed and none of them loads; "
            "elastic-train verify lists the damage; nothing was changed, and --fresh would set the run aside and start anew"
        )
    if reached is not None:
        reached()
    check_same_state(world, state.flatten(), "before step 1")
    kept.forget_unless(0)
    return ResumePoint(step=0, chain="", source="none")


def _claim(
    world: ProcessGroups, store: Store, kept: LocalSnapshot, run_id: str, clock: Clock
) -> AvailableStates:
    records: tuple[dict[str, Any], ...] = ()
    damaged: tuple[tuple[int, str], ...] = ()
    if world.rank == 0:
        found, damages = of_run(committed(store, clock), run_id)
        records = tuple(asdict(record) for record in found)
        damaged = tuple((damage.step, damage.reason) for damage in damages)
    for problem in kept.problems:
        print(problem)
    if kept.snapshot is None:
        return AvailableStates(records=records, damaged=damaged)
    return AvailableStates(
        step=kept.about["step"], checksum=kept.about["checksum"], records=records, damaged=damaged
    )


def _parse(said: dict[str, Any]) -> AvailableStates:
    damaged = tuple((step, reason) for step, reason in said["damaged"])
    return AvailableStates(**said | {"records": tuple(said["records"]), "damaged": damaged})


def _try(  # noqa: PLR0913 - as `restore`
    world: ProcessGroups,
    store: Store,
    kept: LocalSnapshot,
    state: State,
    candidate: Candidate,
    clock: Clock,
    *,
    reached: Callable[[], None] | None,
) -> tuple[ResumePoint | None, str]:
    """(what was loaded, "") or (None, what is wrong with this candidate on the first rank that says so)."""
    mine, problem = _own_copy(world, store, kept, candidate, clock)
    if len(candidate.ranks) < world.size:
        told = world.gather({"size_bytes": 0 if mine is None else mine.numel(), "problem": problem})
        problems = [each["problem"] for each in told if each["problem"]]
        if problems:
            return None, str(problems[0])
        source = candidate.ranks[0]
        mine = world.broadcast(mine, told[source]["size_bytes"], source=source)
    assert mine is not None or problem
    chain = ""
    found: tuple[str, dict[str, str]] = ("", {})
    if mine is not None and not problem:
        chain, found, problem = _load(mine, state)
    if reached is not None:
        reached()
    has_line = candidate.tier is Tier.MEMORY and world.rank in candidate.ranks
    told = world.gather(
        {"problem": problem, "line": kept.about.get("line") if has_line else None, "state": found[0]}
    )
    problems = [each["problem"] for each in told if each["problem"]]
    if problems:
        return None, str(problems[0])
    if len({each["state"] for each in told}) > 1:
        check_same_checksums(world, *found, f"after loading step {candidate.step}")
    line = next((each["line"] for each in told if each["line"] is not None), None)
    return ResumePoint(step=candidate.step, chain=chain, source=_source(world, candidate), line=line), ""


def _own_copy(
    world: ProcessGroups, store: Store, kept: LocalSnapshot, candidate: Candidate, clock: Clock
) -> tuple[Tensor | None, str]:
    """uint8 [n], host memory: this rank's own copy of a candidate, None where it has none; or what is wrong with it."""
    if world.rank not in candidate.ranks:
        return None, ""
    if candidate.tier is Tier.MEMORY:
        return kept.image, ""
    assert candidate.record is not None
    try:
        record = CommitRecord(**candidate.record)
        payload = read_payload(store, record, clock)
        digest = safetensors_header.digest(payload)
        if digest != record.digest:
            raise CheckpointDamaged(f"expected the digest {record.digest[:16]}, found {digest[:16]}")
    except (CheckpointDamaged, StoreFailed, OSError) as error:
        return None, f"{type(error).__name__}: {error}"
    return torch.frombuffer(payload, dtype=torch.uint8), ""


def _load(data: Tensor, state: State) -> tuple[str, tuple[str, dict[str, str]], str]:
    """(chain, checksums of the state that is loaded, what is wrong with it here)."""
    nothing: tuple[str, dict[str, str]] = ("", {})
    try:
        tensors, document = image.read(data.numpy().data, copy=False)
        parts = FlatState(tensors=tensors, document=document["state"])
        state.load(parts)
        expected, found = checksums(parts), checksums(state.flatten())
        if found != expected:
            raise CheckpointDamaged("the objects give another state than the one that they were loaded with")
        return str(document["chain"]), found, ""
    except (ElasticError, OSError, LookupError, TypeError) as error:
        return "", nothing, f"{type(error).__name__}: {error}"


def _source(world: ProcessGroups, candidate: Candidate) -> str:
    if candidate.tier is Tier.STORAGE:
        return "checkpoint"
    return "snapshot" if len(candidate.ranks) == world.size else "peer"


def _report(log: EventLog | None, refused: RejectedState) -> None:
    if log is None:
        return
    if refused.tier is Tier.STORAGE:
        log.record(CheckpointRejected(step=refused.step, reason=refused.reason))
        print(f"checkpoint step={refused.step} is not used ({refused.reason}); trying the next older state")
        return
    log.record(SnapshotRejected(step=refused.step, reason=refused.reason))
    print(f"snapshot step={refused.step} is not used ({refused.reason}); trying the next older state")
