"""A run without a state of its own begins with its parent's numbers, on every rank alike.

Rank 0 reads the parent's checkpoint, verifies it by its digest and sends it to the others. Every
rank loads the entries that --from names (fit.py says what of them). A run that does not fit
its parent gives its run directory back, so that a corrected command can have it.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from elastic.checkpoint.find_parent import record_of
from elastic.config import identity
from elastic.config.parent import Parent
from elastic.config.run_dir import RunDir
from elastic.errors import CheckpointDamaged, StoreFailed, UsageError
from elastic.inherit.fit import load_entries
from elastic.snapshot import image
from elastic.storage.remote import open_store
from elastic.storage.store import Store, retrying
from elastic.system.clock import Clock
from elastic.train.groups import ProcessGroups
from elastic.train.state.flat import FlatState
from elastic.train.state.spread import Copy, read_copy, spread
from elastic.train.state.state import State

STORAGE_PATIENCE_S = 60.0
MOST_NAMED = 4  # misfits in one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What a run that has no state yet begins from. run_store: of the run's own directory."""

    parent: Parent
    run_store: Store

    def load(self, state: State, groups: ProcessGroups, clock: Clock) -> None:
        """Give the objects the parent's state, on every rank.

        Raises UsageError on every rank where an entry does not fit, and on rank 0 where the
        parent's state is gone or damaged; StoreFailed on rank 0; PeerLost.
        """
        data = spread(groups, self._read(clock) if groups.rank == 0 else Copy())
        assert isinstance(data, Tensor), "rank 0 has read it"
        tensors, document = image.read(data.numpy().data, copy=False)
        saved = FlatState.read(tensors, document)
        problems, notes = load_entries(saved, state, self.parent.entries)
        misfits = next((of_rank for of_rank in groups.all_gather(problems) if of_rank), None)
        if misfits is not None:
            if groups.rank == 0:
                # It was claimed for a run that never trained. The next command claims it again.
                with suppress(StoreFailed):
                    self.run_store.delete(identity.NAME)
            # The agent ends all ranks when the first one has left: none may leave before that.
            groups.from_rank0("given back")
            more = f"; and {len(misfits) - MOST_NAMED} more" if len(misfits) > MOST_NAMED else ""
            raise UsageError(
                f"expected {self.parent} to fit this recipe, found: {'; '.join(misfits[:MOST_NAMED])}{more}. Correct the recipe, or name "
                f"the entries to take: --from {self.parent.url}@{self.parent.step}:ENTRY,... (the others begin as the recipe builds them)"
            )
        if groups.rank == 0:
            parent, taken = self.parent, sorted(self.parent.entries or state.objects)
            where = f"step {parent.step} of {parent.url} (digest {parent.digest[:16]})"
            print(f"begins from {where}, entries {', '.join(taken)}; steps count from 1")
            if fresh := sorted(state.objects.keys() - set(taken)):
                notes = [*notes, f"{', '.join(fresh)}: as the recipe builds it"]
            for note in notes:
                print(f"  {note}")

    def _read(self, clock: Clock) -> Copy:
        store = open_store(RunDir.parse(self.parent.url).checkpoints_url)
        deadline = clock.monotonic() + STORAGE_PATIENCE_S
        try:
            record = retrying(partial(record_of, self.parent, store, clock), clock=clock, deadline=deadline)
            return retrying(partial(read_copy, store, record, clock), clock=clock, deadline=deadline)
        except CheckpointDamaged as error:
            raise UsageError(
                f"expected {self.parent}, from which this run begins, found it damaged: {error}; "
                "take another state with --from, and another --run-dir"
            ) from error
