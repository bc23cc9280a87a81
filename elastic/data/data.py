"""`Data` is a data set in the run's order; what cannot be put into an order is refused by name."""

from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from elastic.data.loader import Loader
from elastic.errors import UsageError


@dataclass(frozen=True, kw_only=True)  # without slots, whose error says nothing of a new name
class Data:
    """A dataset in the run's order; made by `Run.data`. It has no attributes to set."""

    loader: Loader

    @property
    def steps_per_epoch(self) -> int:
        """Raises UsageError where epochs differ in it, as they may with `order`."""
        order = self.loader.order
        ends = (0, *(order.ends or (order.steps_per_epoch,)))
        found = {end - before for before, end in pairwise(ends)}
        if len(found) > 1:
            raise UsageError(
                f"expected epochs of equally many steps, found {min(found)} to {max(found)}; use step.ends_epoch instead"
            )
        return found.pop()

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.loader.order.steps


def check_dataset(dataset: Any, where: str) -> int:
    """The number of samples of a map-style dataset.

    where: the call that was given it. Raises UsageError for what has no samples by number.
    """
    if isinstance(dataset, DataLoader):
        raise UsageError(
            f"{where}: expected a dataset, found a DataLoader; pass its dataset (loader.dataset), with workers=... and "
            "collate=... where it has them: the run itself makes batches and shuffles"
        )
    if isinstance(dataset, IterableDataset | dict) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise UsageError(
            f"{where}: expected a map-style dataset, with __len__ and __getitem__(number), found {type(dataset).__name__}; give the samples of a stream "
            "numbers, such as an index of files and offsets, or load it into a list"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            f"{where}: expected a dataset of a known length, found {type(dataset).__name__} ({error})"
        ) from error


def check_loading(workers: Any, collate: Any, where: str) -> None:
    """Raises UsageError for what cannot say how samples are loaded. where: as above."""
    if not isinstance(workers, Integral) or isinstance(workers, bool) or int(workers) < 0:
        raise UsageError(
            f"{where}: expected workers=, a number of loading processes from 0 on, found {workers!r}"
        )
    if collate is not None and not callable(collate):
        raise UsageError(
            f"{where}: expected collate=, a function of a list of samples, found {type(collate).__name__}"
        )
