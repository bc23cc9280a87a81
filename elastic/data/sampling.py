"""What a recipe says about its samples becomes an order that is a function of (seed, epoch, step).

A mistake is refused here, before the first step, with what was expected and found. An order of the
recipe's own (`order=`) is a function of the epoch; it runs under the epoch's own random stream and
disturbs no other draw. It is asked for every epoch of the run at once, and again when the epoch
begins. So a function that also depends on the training, or on earlier calls, is found: its second
answer differs from the first.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.data import random_streams
from elastic.data.order import Draws, SampleOrder, Tail, short_sha256, steps_in, weighted_draws
from elastic.errors import UsageError

OrderOfEpoch = Callable[[int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The arguments of `Run.data`; see there."""

    epochs: int | None
    steps: int | None
    tail: str
    weights: Any
    order: OrderOfEpoch | None

    def order_of(self, *, samples: int, seed: int, global_batch: int, shards: int) -> SampleOrder:
        """The order in which a data set of so many samples is trained. Raises UsageError."""
        epochs, steps = whole_number("epochs", self.epochs), whole_number("steps", self.steps)
        if (epochs is None) == (steps is None):
            found = "neither" if epochs is None else f"epochs={epochs} and steps={steps}"
            raise UsageError(f"expected either epochs=... or steps=... in run.data, found {found}")
        if self.tail not in (Tail.DROP.value, Tail.PAD.value):
            raise UsageError(f"expected tail='drop' or 'pad', found {self.tail!r}")
        if self.weights is not None and self.order is not None:
            raise UsageError(
                "expected weights=... or order=... in run.data, found both; let the order function draw by weights itself"
            )
        plain = SampleOrder(
            seed=seed,
            samples=samples,
            global_batch=global_batch,
            shards=shards,
            epochs=epochs or 1,
            tail=Tail(self.tail),
            most_steps=steps,
        )
        if self.order is not None:
            return _in_own_order(plain, self.order, epochs)
        if plain.steps_per_epoch < 1:
            raise UsageError(
                f"expected at least one global batch in an epoch, found {samples} samples "
                f"and a global batch of {global_batch}; take a smaller global batch, more data or tail='pad'"
            )
        if steps is not None:
            plain = replace(plain, epochs=-(-steps // plain.steps_per_epoch))
        return plain if self.weights is None else _weighted(plain, self.weights)


def whole_number(name: str, given: Any) -> int | None:
    """The number as an int (NumPy's too). Raises UsageError unless it is a whole one from 1 on."""
    if given is None:
        return None
    try:
        number = 0 if isinstance(given, bool) else index(given)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(f"expected {name} to be a whole number from 1 on, found {given!r:.100}")
    return number


def _weighted(plain: SampleOrder, weights: Any) -> SampleOrder:
    given = None
    with suppress(TypeError, ValueError, OverflowError):  # what are no numbers
        given = np.asarray(_on_host(weights), dtype=np.float64)
    if given is None or given.shape != (plain.samples,):
        found = type(weights).__name__ if given is None else f"shape {list(given.shape)}"
        raise UsageError(
            f"expected a number as weight for each of the {plain.samples} samples, found {found}"
        )
    if wrong := given[~np.isfinite(given) | (given < 0)].tolist() or not given.any():
        found = "zeros alone" if wrong is True else str(wrong[0])
        raise UsageError(f"expected weights that are finite, not negative and not all zero, found {found}")
    return replace(plain, draws=weighted_draws(plain.seed, given))


def _in_own_order(plain: SampleOrder, order: OrderOfEpoch, epochs: int | None) -> SampleOrder:
    """Asks for every epoch that the run begins."""
    if not callable(order):
        raise UsageError(
            f"expected order=function(epoch) that returns the numbers of the epoch's samples, found {type(order).__name__}"
        )
    ask = partial(_ask, order, plain.seed, plain.samples)
    ends: list[int] = []
    of_epochs: list[str] = []
    while len(ends) < epochs if epochs is not None else not ends or ends[-1] < (plain.most_steps or 0):
        epoch = len(ends)
        indices = ask(epoch)
        steps = steps_in(len(indices), plain.global_batch, plain.tail)
        if steps < 1:
            raise UsageError(
                f"order({epoch}): expected at least one global batch of {plain.global_batch}, found {len(indices)} samples; "
                "take a smaller global batch, more samples or tail='pad'"
            )
        ends.append((ends[-1] if ends else 0) + steps)
        of_epochs.append(short_sha256(indices))
    sha256 = hashlib.sha256(" ".join(of_epochs).encode()).hexdigest()[:16]
    draws = Draws(of_epoch=partial(_ask_again, ask, of_epochs), ends=tuple(ends), sha256=sha256)
    return replace(plain, epochs=len(ends), draws=draws)


def _ask(order: OrderOfEpoch, seed: int, samples: int, epoch: int) -> NDArray[np.int64]:
    """What the recipe's function returns for an epoch, int64 [n]. Raises UsageError."""
    with random_streams.kept():
        random_streams.enter(seed, "epoch order", epoch)
        given = order(epoch)
    found = None
    if hasattr(given, "__len__") and not isinstance(given, dict):
        with suppress(TypeError, ValueError):  # rows of different lengths; types that NumPy lacks
            found = np.asarray(_on_host(given))
    if found is None or found.ndim != 1 or (found.dtype.kind not in "iu" and found.size):
        kind = (
            type(given).__name__ if found is None or not found.ndim else f"{found.dtype} {list(found.shape)}"
        )
        raise UsageError(
            f"order({epoch}): expected a sequence of sample numbers (integers, one dimension), found {kind}"
        )
    wrong = np.flatnonzero((found < 0) | (found >= samples))
    if len(wrong):
        raise UsageError(
            f"order({epoch}): expected sample numbers from 0 to {samples - 1}, found {found[wrong[0]]} at place {wrong[0]}"
        )
    return found.astype(np.int64)


def _ask_again(
    ask: Callable[[int], NDArray[np.int64]], of_epochs: list[str], epoch: int
) -> NDArray[np.int64]:
    indices = ask(epoch)
    if short_sha256(indices) != of_epochs[epoch]:
        raise UsageError(
            f"order({epoch}): expected the same samples at each call, found other ones: it may depend on the epoch and on random numbers drawn inside it "
            "alone; what the training chooses belongs in elastic.Values"
        )
    return indices


def _on_host(given: Any) -> Any:
    return given.detach().cpu() if hasattr(given, "detach") else given
