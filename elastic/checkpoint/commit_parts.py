"""A checkpoint in parts exists once its commit record does, created by the node of the last part.

    <step>/a-<generation>-<id>/part-00001-<id>.safetensors   a part, of whichever node stores it
    <step>/a-<generation>-<id>/part-00001.json               created after it: what it is
    <step>/a-<generation>-<id>/COMMIT.json                   created once all of these are there

Every node stores the parts of its ranks under one attempt, whose name follows from the state. Then
it looks for those of the others. Where one stays away for long, because its node died, a node that
has a copy stores that. Each of these files is created where there is none, so that it does not
matter who does it, nor how often: a save that is tried again goes on where it was.

What commit.py says of an attempt, a fence and a deadline holds here. No node waits for ever.
"""

import hashlib
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

from elastic.checkpoint.commit import Committed, Write, WriteLimits, other_state_text
from elastic.checkpoint.payload_check import digest_of
from elastic.checkpoint.record import COMMIT, Hashes, Part, Save, parse, sealed, step_dir, unsealed
from elastic.errors import CheckpointDamaged, StoreFailed
from elastic.storage.store import Payload, Store, create_or_read, read_small
from elastic.system.clock import Clock
from elastic.system.untrusted import decode

# Beside the time that this node's own parts took: until it stores copies, and until it gives up.
COPIES_S, OTHERS_S = 2.0, 10.0
POLL_S = 0.05


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
    the record is to have its digest, for which all of it is read.
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
        attempt = f"a-{self.save.generation:06d}-{hashlib.sha256(named.encode()).hexdigest()[:8]}"
        write = Write(self.store, self.save, self.limits, self.clock, attempt)
        self._store_all(write, [each for each in parts if not each.is_copy])
        own_s = self.clock.monotonic() - began_s
        found, patience_s = self._others(write, COPIES_S + own_s), OTHERS_S + own_s
        if isinstance(found, list):
            self._store_all(write, [each for each in parts if each.is_copy and each.number in found])
            found = self._others(write, patience_s)
        if isinstance(found, list):
            raise StoreFailed(
                f"the parts of ranks {', '.join(map(str, found))} were not stored within {patience_s:.0f} s; "
                "did their nodes, or uploaders, die?"
            )
        return found

    def _store_all(self, write: Write, parts: Sequence[OfferedPart]) -> None:
        """Those that are not there, all at once."""
        missing = [each for each in parts if self._stored(write, each.number) is None]
        if missing:
            with ThreadPoolExecutor(2 * len(missing)) as pool:
                hashed = [pool.submit(each.hashes).result for each in missing]
                for done in [
                    pool.submit(self._store, write, *each) for each in zip(missing, hashed, strict=True)
                ]:
                    done.result()

    def _store(self, write: Write, part: OfferedPart, hashed: Callable[[], Hashes]) -> None:
        file = f"part-{part.number:05d}-{uuid.uuid4().hex[:8]}.safetensors"
        name = f"{self._folder(write)}/{file}"
        try:
            write.upload(name, part.payload, self.reached)
            told = Part(name=file, size_bytes=part.payload.size_bytes, sha256=hashed().sha256)
        except BaseException:
            write.drop(name)
            raise
        record = sealed(asdict(told))
        # A call that fails may have created it all the same.
        if create_or_read(self.store, self._name(write, part.number), record, self.clock) != record:
            write.drop(name)

    def _others(self, write: Write, patience_s: float) -> Committed | list[int]:
        """The checkpoint, once all parts are there; the numbers of those that stay away."""
        until_s, parts = self.clock.monotonic() + patience_s, list[Part]()
        name = f"{self._folder(write)}/{COMMIT}"
        while len(parts) < self.of:
            if (part := self._stored(write, len(parts))) is not None:
                parts.append(part)
            elif self.clock.monotonic() >= until_s:
                return [at for at in range(self.of) if self._stored(write, at) is None] or [len(parts)]
            else:
                write.check_may_go_on()
                self.clock.sleep(POLL_S)
        if (data := read_small(self.store, name, self.clock)) is None:
            return self._publish(write, tuple(parts))
        return Committed(record=parse(data), is_ours=False, difference="")

    def _publish(self, write: Write, parts: tuple[Part, ...]) -> Committed:
        sha256 = hashlib.sha256("".join(each.sha256 for each in parts).encode()).hexdigest()
        hashes = Hashes(digest="", sha256=sha256, checksum=self.checksum)
        record = write.record(hashes, sum(each.size_bytes for each in parts), parts)
        if self.has_digest:
            record = replace(record, digest=digest_of(self.store, record, self.clock))
        self.reached("before-commit")
        if (other := write.other()) is None or (self.has_digest and not other.digest):
            write.publish(record)
            self.reached("after-commit")
            data = read_small(self.store, record.name, self.clock)
            found = record if data is None else parse(data)
            return Committed(record=found, is_ours=found == record, difference="")
        difference = "" if other.checksum == record.checksum else other_state_text(other)
        return Committed(record=other, is_ours=False, difference=difference)

    def _stored(self, write: Write, number: int) -> Part | None:
        data = read_small(self.store, self._name(write, number), self.clock)
        try:
            return None if data is None else decode(Part, unsealed(data), what="the record of a part")
        except ValueError as error:
            raise CheckpointDamaged(str(error)) from error

    def _folder(self, write: Write) -> str:
        return f"{step_dir(self.save.step)}/{write.attempt}"

    def _name(self, write: Write, number: int) -> str:
        return f"{self._folder(write)}/part-{number:05d}.json"
