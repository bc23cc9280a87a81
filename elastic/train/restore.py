"""Training goes on from the newest checkpoint that every rank has loaded and that is, on every rank, what its commit record says.

Rank 0 proposes, newest first; all load, each onto its own device; all say whether it worked. A checkpoint that fails anywhere is reported and
left where it is, and the next older one is proposed. If commit records exist and none loads, that is an error: nobody starts over silently.
"""

from dataclasses import asdict, dataclass
from typing import Any

from elastic.checkpoint import image
from elastic.checkpoint.catalog import Damage, committed, read_payload
from elastic.checkpoint.record import CommitRecord
from elastic.checkpoint.store import Store
from elastic.clock import Clock
from elastic.errors import CheckpointDamaged, ElasticError, NothingLoads
from elastic.events import CheckpointRejected
from elastic.observe.log import EventLog
from elastic.train.state import Parts, State, digests
from elastic.train.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What is known about the state that training goes on from; step 0 is the start."""

    step: int
    chain: str
    source: str


def restore(world: World, store: Store, state: State, log: EventLog | None, clock: Clock) -> Loaded:
    """Raises NothingLoads, or PeerLost. `log` is rank 0's."""
    candidates, damaged = _candidates(world, store, clock)
    for step, reason in damaged:
        _reject(log, step, reason)
    for fields in candidates:
        record = CommitRecord(**fields)
        chain, problem = _load(store, record, state, clock)
        problems = [p for p in world.gather(problem) if p]
        if not problems:
            return Loaded(step=record.step, chain=chain, source="checkpoint")
        _reject(log, record.step, problems[0])
    if candidates or damaged:
        raise NothingLoads(
            f"{len(candidates) + len(damaged)} checkpoints are committed and none of them loads; "
            "elastic-train verify lists the damage; nothing was changed, and --fresh would set the run aside and start anew"
        )
    return Loaded(step=0, chain="", source="none")


def _candidates(
    world: World, store: Store, clock: Clock
) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """Rank 0's listing, so that all ranks try the same ones in the same order."""
    found: tuple[list[Any], list[Any]] = ([], [])
    if world.rank == 0:
        records, damages = committed(store, clock)
        found = [asdict(record) for record in records], [_pair(damage) for damage in damages]
    records_of_first, damages_of_first = world.from_first(found)
    return records_of_first, [(step, reason) for step, reason in damages_of_first]


def _pair(damage: Damage) -> tuple[int, str]:
    return damage.step, damage.reason


def _load(store: Store, record: CommitRecord, state: State, clock: Clock) -> tuple[str, str]:
    """(chain, "") or ("", what is wrong with it here)."""
    try:
        tensors, document = image.read(read_payload(store, record, clock))
        state.put_together(Parts(tensors=tensors, document=document["state"]))
        digest, _ = digests(state.take_apart())
        if digest != record.digest:
            raise CheckpointDamaged(
                f"expected the state's digest {record.digest[:16]}, found {digest[:16]} after loading"
            )
        return str(document["chain"]), ""
    except (ElasticError, OSError, KeyError) as error:
        return "", f"{type(error).__name__}: {error}"


def _reject(log: EventLog | None, step: int, reason: str) -> None:
    if log is not None:
        log.record(CheckpointRejected(step=step, reason=reason))
        print(f"checkpoint step={step} does not load ({reason}); trying the next older one")
