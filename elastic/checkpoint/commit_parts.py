"""A checkpoint in parts exists once its commit record does, created by a node that finds all parts.

    <step>/a-<generation>-<id>/part-00001-<id>.safetensors   a part, of whichever node stores it
    <step>/a-<generation>-<id>/part-00001.json               created after it: what it is
    <step>/a-<generation>-<id>/COMMIT.json                   created once all of these are there

Every node stores the parts of its ranks under one attempt, whose name follows from the state. Then
it looks for those of the others. Where one stays away, perhaps because its node died, a node that
has a copy stores that. Each of these files is created where there is none, so that it does not
matter who does it, nor how often: a save that is tried again goes on where it was.

What commit.py says of an attempt, a fence and a deadline holds here. A node waits for others for
OTHERS_S and as long as all parts would take it.
"""

import hashlib
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from elastic.checkpoint.commit import Committed, Write, WriteLimits, are_other_states, other_state_text
from elastic.checkpoint.payload_check import digest_of
from elastic.checkpoint.prune import sweep_parts
from elastic.checkpoint.record import (
    COMMIT,
    Hashes,
    Part,
    Save,
    parse,
    save_limit_s,
    sealed,
    sums_of,
    unsealed,
)
from elastic.errors import CheckpointDamaged, StoreFailed
from elastic.storage.store import Payload, Store, StoreUnavailable, create_or_read, read_small, retrying
from elastic.system.clock import Clock
from elastic.system.untrusted import decode

# Beside the time that this node's own parts took: until it stores copies, and until it gives up.
COPIES_S, OTHERS_S = 2.0, 10.0
POLL_S, LONGEST_POLL_S = 0.05, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedPart:
    """hashes: computes those of its image. is_copy: another node is to store it."""

    number: int
    payload: Payload
    hashes: Callable[[], Hashes]
    is_copy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsCommit:
    """What a node does for a checkpoint of `of` parts. checksum: of the whole state. has_digest:
    the record is to have its digest, for which the node of the first part reads all of it, or if it
    stays away another one.
    """

    store: Store
    save: Save
    of: int
    checksum: str
    has_digest: bool
    limits: WriteLimits
    clock: Clock
    reached: Callable[[str], None]

    def commit(self, parts: Sequence[OfferedPart]) -> Committed:
        """Raises as commit.commit does; StoreFailed too where parts of others stay away."""
        began_s = self.clock.monotonic()
        named = f"{self.save} {self.of} {self.checksum} {self.has_digest}"
        own_name = hashlib.sha256(named.encode()).hexdigest()[:8]
        write = Write(self.store, self.save, self.limits, self.clock, own_name)
        if any(each.number == 0 for each in parts):
            write.check_may_go_on()
            with suppress(StoreFailed):  # a store that lists nothing may still take a save
                sweep_parts(self.store, self.clock, self.save)
        own = [each for each in parts if not each.is_copy]
        stored_bytes = self._store_all(write, own)
        own_s = self.clock.monotonic() - began_s
        known: dict[int, Part] = {}
        missing = self._await(write, known, COPIES_S + own_s)
        copies = [each for each in parts if each.is_copy and each.number in missing]
        if not stored_bytes:  # by an earlier try, which tells no time
            own_s = save_limit_s(0.0, sum(each.payload.size_bytes for each in own))
        others_s = OTHERS_S + own_s * self.of / max(1, len(own))
        if missing:
            self._store_all(write, copies)
            missing = self._await(write, known, others_s)
        if missing:
            waited_s = self.clock.monotonic() - began_s
            raise StoreFailed(
                f"the parts of ranks {', '.join(map(str, missing))} were not stored within {waited_s:.0f} s; "
                "did their nodes, or uploaders, die?"
            )
        if not self.has_digest or any(each.number == 0 for each in (*own, *copies)):
            others_s = 0.0
        return self._committed(write, tuple(known[number] for number in range(self.of)), others_s)

    def _store_all(self, write: Write, parts: Sequence[OfferedPart]) -> int:
        """Those that are not there, all at once; returns how many bytes."""
        missing = [each for each in parts if self._stored(write, each.number) is None]
        if missing:
            with ThreadPoolExecutor(2 * len(missing)) as pool:
                hashed = [pool.submit(each.hashes).result for each in missing]
                pairs = zip(missing, hashed, strict=True)
                for done in [pool.submit(self._store, write, *each) for each in pairs]:
                    done.result()
        return sum(each.payload.size_bytes for each in missing)

    def _store(self, write: Write, part: OfferedPart, hashed: Callable[[], Hashes]) -> None:
        file = f"part-{part.number:05d}-{uuid.uuid4().hex[:8]}.safetensors"
        name = f"{write.folder}/{file}"
        try:
            write.upload(name, part.payload, self.reached)
            told = Part(name=file, size_bytes=part.payload.size_bytes, sha256=hashed().sha256)
        except BaseException:
            write.drop(name)
            raise

        def create() -> bytes:
            write.check_may_go_on()
            return create_or_read(self.store, self._name(write, part.number), record, self.clock)

        record = sealed(asdict(told))
        # A call that fails may have created it all the same.
        if retrying(create, clock=self.clock, deadline=self.limits.deadline) != record:
            write.drop(name)

    def _await(self, write: Write, known: dict[int, Part], within_s: float) -> list[int]:
        """Add the stored parts to those that are known, and return which are not there by then.

        They are awaited one after another: to ask for each of hundreds again and again would be a
        load for the store.
        """
        pause_s, until_s = POLL_S, self.clock.monotonic() + within_s
        for number in range(self.of):
            while number not in known:
                if (part := self._stored(write, number)) is not None:
                    known[number] = part
                elif self.clock.monotonic() >= until_s:
                    break
                else:
                    write.check_may_go_on()
                    self.clock.sleep(pause_s)
                    pause_s = min(1.1 * pause_s, LONGEST_POLL_S)
        return [number for number in range(self.of) if number not in known]

    def _committed(self, write: Write, parts: tuple[Part, ...], others_s: float) -> Committed:
        """The checkpoint of these parts, which are stored. others_s: another node may take it."""
        name = f"{write.folder}/{COMMIT}"
        size_bytes, sha256 = sums_of(parts)
        hashes = Hashes(digest="", sha256=sha256, checksum=self.checksum)
        record = write.record(hashes, size_bytes, parts)
        if (other := write.other()) is not None:
            if are_other_states(other, record, self.store, self.clock):
                return Committed(record=other, is_ours=False, difference=other_state_text(other))
            if other.digest or not self.has_digest:
                return Committed(record=other, is_ours=False, difference="")
        until_s = self.clock.monotonic() + others_s
        while True:
            with suppress(StoreUnavailable):
                if (data := read_small(self.store, name, self.clock)) is not None:
                    return Committed(record=parse(data), is_ours=False, difference="")
                if self.clock.monotonic() >= until_s:
                    break
            write.check_may_go_on()
            self.clock.sleep(LONGEST_POLL_S)
        self.reached("before-commit")
        if self.has_digest:
            record = replace(record, digest=digest_of(self.store, record, self.clock))
        write.publish(record)
        if any(self._stored(write, number) != part for number, part in enumerate(parts)):  # a sweep is at it
            self.store.delete(name)
            raise StoreFailed(f"the parts of step {self.save.step} were swept: a later save had begun")
        self.reached("after-commit")
        stored = read_small(self.store, name, self.clock)
        found = record if stored is None else parse(stored)
        return Committed(record=found, is_ours=found == record, difference="")

    def _stored(self, write: Write, number: int) -> Part | None:
        """None where it is not there, or the store does not answer."""
        try:
            data = read_small(self.store, self._name(write, number), self.clock)
            return None if data is None else decode(Part, unsealed(data), what="the record of a part")
        except StoreUnavailable:
            return None
        except ValueError as error:
            raise CheckpointDamaged(str(error)) from error

    def _name(self, write: Write, number: int) -> str:
        return f"{write.folder}/part-{number:05d}.json"
