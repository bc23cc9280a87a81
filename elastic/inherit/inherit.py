"""A run without a state of its own begins with its parent's numbers, on every rank alike.

Rank 0 reads the parent's checkpoint, verifies it by its digest and sends it to the others. Every
rank loads the entries that --from names (fit_entries.py says what of them). A run that does not fit
its parent gives its run directory back, so that a corrected command can have it.
"""

from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from elastic.checkpoint.find_parent import record_of
from elastic.config import identity
from elastic.config.parent import Parent
from elastic.config.run_dir import RunDir
from elastic.errors import CheckpointDamaged, StoreFailed, UsageError
from elastic.inherit.entries import Problems, load_entries
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
        data = self._data(groups, clock)
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
            raise UsageError(self._sentence(misfits, saved, state))
        if groups.rank == 0:
            parent, taken = self.parent, sorted(self.parent.entries or state.objects)
            where = f"step {parent.step} of {parent.url} (digest {parent.digest[:16]})"
            print(f"begins from {where}, entries {', '.join(taken)}; steps count from 1")
            if fresh := sorted(state.objects.keys() - set(taken)):
                notes = [*notes, f"{', '.join(fresh)}: as the recipe builds it"]
            for note in notes:
                print(f"  {note}")

    def _data(self, groups: ProcessGroups, clock: Clock) -> Tensor:
        """The parent's image, uint8 [n] in host memory, on every rank."""
        found = spread(groups, self._read(clock) if groups.rank == 0 else Copy())
        assert isinstance(found, Tensor), "rank 0 has read it"
        return found

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

    def _sentence(self, misfits: Problems, saved: FlatState, state: State) -> str:
        words = [each for of_entry in misfits.values() for each in of_entry]
        named, more = "; ".join(words[:MOST_NAMED]), len(words) - MOST_NAMED
        state_url = f"{self.parent.url}@{self.parent.step}"
        modules = [name for name in misfits if isinstance(state.objects.get(name), nn.Module)]
        lost = [name for name in modules if name in saved.document]
        beside = ""
        if lost:
            beside = (
                f". A module is taken whole: for new layers build {lost[0]} as it was there, and give them an entry of their own, "
                f"State({lost[0]}=..., new=...), with --from {state_url}:{lost[0]}: a new head beside the old one, which is not used any "
                "more, or adapters that forward hooks of the old layers call"
            )
        fitting = self._fitting(misfits, saved, state, without_others=bool(lost))
        take = f", or take what fits: --from {state_url}:{','.join(fitting)}; the others begin as the recipe builds them"
        if any(isinstance(state.objects.get(name), LRScheduler) for name in misfits):
            take += " (a scheduler in State goes on where it was, with the rates it had)"
        return (
            f"expected {self.parent} to fit this recipe, found: {named}{f'; and {more} more' if more > 0 else ''}. "
            f"It has the entries {', '.join(sorted(saved.document))}, and this State has {', '.join(sorted(state.objects))}. "
            f"{self._remedy(misfits, saved, state)}{take if fitting else ''}{beside}"
        )

    def _remedy(self, misfits: Problems, saved: FlatState, state: State) -> str:
        """What to correct: names that only the command has, or else the recipe."""
        unknown = sorted(
            misfits.keys() & set(self.parent.entries) - saved.document.keys() - state.objects.keys()
        )
        return (
            f"Correct --from, where {', '.join(unknown)} names no entry" if unknown else "Correct the recipe"
        )

    def _fitting(
        self, misfits: Problems, saved: FlatState, state: State, *, without_others: bool
    ) -> list[str]:
        """The wanted entries that fit, as far as is known.

        without_others: a module does not. What goes with it, such as its optimizer's moments, is of
        no use without it; other modules are.
        """
        wanted = set(self.parent.entries) or state.objects.keys()
        fitting = sorted((saved.document.keys() & state.objects.keys() & wanted) - misfits.keys())
        if "" in misfits:
            return []
        return [name for name in fitting if not without_others or isinstance(state.objects[name], nn.Module)]
