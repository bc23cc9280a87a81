"""Processes load batches ahead of their use, each as this process would; so do their errors.

A signal that asks for a stop is not for them: the step under way still needs its data.
"""

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from elastic.data import random_streams
from elastic.system import forked_child, stop_signals

SLICES_AHEAD = 2  # of each process at least, as torch has it by default
Request = list[tuple[int, int, int]]  # epoch, stream and number of each sample of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedBatches(Dataset[Any]):
    """The collated samples of a request, each loaded under its own random stream."""

    dataset: Any
    seed: int
    collate: Callable[[list[Any]], Any]

    def __getitem__(self, request: Request) -> Any:
        return self.collate([self._sample(*each) for each in request])

    def _sample(self, epoch: int, stream: int, sample: int) -> Any:
        random_streams.enter(self.seed, "sample", epoch, stream)
        return self.dataset[sample]


def slices_ahead(count: int, ahead: int) -> int:
    """How many batches so many processes load before they are asked for, where `ahead` are wanted.

    As many for each process.
    """
    return count * max(SLICES_AHEAD, -(-ahead // count))


def load_in_processes(
    batches: KeyedBatches, requests: Iterator[Request], count: int, *, ahead: int
) -> Iterator[Any]:
    """The batches of these requests, in order.

    count: of processes. They have begun when it returns, with the dataset as it is, and load until
    the last batch. ahead: as for `slices_ahead`.
    """
    # Registered after multiprocessing's own handler, so it runs before that one, which would
    # send SIGTERM to the data-loading processes, which ignore it, and wait for them forever.
    atexit.unregister(_kill_loading_processes)
    atexit.register(_kill_loading_processes)
    loading = DataLoader(
        batches,
        batch_size=None,  # a request is a whole batch
        sampler=requests,
        num_workers=count,
        prefetch_factor=slices_ahead(count, ahead) // count,
        collate_fn=_as_it_is,
        worker_init_fn=_ignore_stop_signals,
    )
    with stop_signals.blocked():
        return iter(loading)


def _as_it_is(data: Any) -> Any:
    return data


def _ignore_stop_signals(_number: int) -> None:
    """In a data-loading process, as the first line of stop_signals.py has it."""
    stop_signals.ignore()


def _kill_loading_processes() -> None:
    with suppress(ValueError):  # not the main thread
        # Torch's handler would raise an error here because a loading process was killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon and not forked_child.is_one():  # a child has its parent's list
            process.kill()
