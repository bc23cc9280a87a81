"""What the function of an evaluation reads has the same contents on every rank, or it is refused.

Scripts for DistributedDataParallel load the best weights on rank 0 alone, which is where they
evaluate. Here each rank computes blocks of its own, so that the sum would be that of two models.
Compared are parameters, buffers and modes of the modules that the function can reach, tensors and
arrays that it names itself, by sums of words, one pass over the memory, and numbers that its code
names (number_inputs.py).

It does not compare numbers that look like a rank's own (its number, its process id, the time of
day), nor what lies in lists and objects beside modules: a function may collect its own rank's
blocks there. Within a step, what the State saves is left out: the comparison of states finds it,
and knows a machine's error.
"""

import hashlib
import os
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from torch import Tensor, nn

from elastic.errors import UsageError
from elastic.train.flat_state import sha256_of
from elastic.train.liveness import LoopNames
from elastic.train.number_inputs import numbers_read
from elastic.train.process_groups import ProcessGroups
from elastic.train.reachable import read_by
from elastic.train.site import Form

Sums = dict[str, str]


class SameInputs:
    """Of one evaluation. modules: that the function can reach."""

    def __init__(self, function: Callable[..., Any], left_out: Collection[int]) -> None:
        """left_out: ids of tensors."""
        sites, self.modules = read_by(function)
        of_modules = {id(tensor) for module in self.modules for tensor in tensors_of(module)}
        # Pairs, since functions may call different things by one name (two closures' `scale`).
        self._things = [
            (site.path, site.thing)
            for site in sites
            if site.form in (Form.TENSOR, Form.ARRAY)
            and id(site.thing) not in left_out
            and (id(site.thing) in of_modules or not {".", "["} & set(site.path))
        ]
        # Their dict of attributes has the mode, in which dropout and BatchNorm compute.
        self._modules = [
            (site.path, site.thing)
            for site in sites
            if site.form is Form.NAMES and "_parameters" in site.thing
        ]
        self._numbers = numbers_read(function, LoopNames())
        self._sums: Sums = {}

    def whole(self) -> str:
        """16 digits, of all that is compared, as it is now, on this rank."""
        found = [(path, _sha256(thing)) for path, thing in self._things]
        found += [(f"{path}.training", str(each.get("training"))) for path, each in self._modules]
        found += self._numbers.items()
        self._sums = {}
        for path, text in found:
            self._sums[path] = f"{self._sums.get(path, '')} {text}"
        return hashlib.sha256(repr(sorted(self._sums.items())).encode()).hexdigest()[:16]

    def refuse(self, groups: ProcessGroups) -> None:
        """Where `whole` differs between ranks. Raises UsageError on all of them."""
        numbers = [str(number) for number in (groups.rank, groups.local_rank, os.getpid())]
        gathered: list[tuple[Sums, list[str]]] = groups.all_gather((self._sums, numbers))
        of_ranks = [sums for sums, _ in gathered]
        first = of_ranks[0]

        def is_own(path: str) -> bool:
            return all(sums.get(path, "").strip() in own for sums, own in gathered)

        for rank, there in enumerate(of_ranks):
            # One rank may have a tensor where another has None, or nothing.
            for path in [*there, *(each for each in first if each not in there)]:
                if first.get(path) != there.get(path) and not is_own(path):
                    is_on_both = path in first and path in there
                    where = f"is another one on rank {rank} than on rank 0"
                    alone = f"is there on rank {0 if path in first else rank} and not on rank {rank if path in first else 0}"
                    raise UsageError(
                        f"run.evaluate: the function reads {path}, which {where if is_on_both else alone}: each rank computes a part of the "
                        "data set, so that the sum would mix the two. Do on every rank what changes it: load the best weights and call eval() on all of "
                        "them, not below `if run.is_first:`, and compute a threshold from run.evaluate or step.sum"
                    )


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of the module itself."""
    found = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
    return [tensor for tensor in found if tensor is not None]


def _sha256(thing: Tensor | np.ndarray) -> str:
    """16 digits; of a tensor without numbers of its own, what tells its form."""
    if isinstance(thing, Tensor) and (thing.is_meta or thing.is_quantized):
        return f"{thing.dtype} {list(thing.shape)}"
    return sha256_of([thing])
