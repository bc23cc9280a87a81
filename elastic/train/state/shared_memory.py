"""Tensors that shared memory when they were saved share it again after a load.

An object of the recipe may keep the model's parameters without a copy, on purpose or by mistake.
Its tensors change with the model's then, after a restart as before it. A tensor that was shared
with one that lives already (a module's, which loads into its own memory) is that one; of others
each object gets the same copy.

It knows tensors that share all their memory, under one shape. Of a view of a part only a trial load
(trial_load.py) sees that it is torn from its memory.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from elastic.snapshot import image
from elastic.train.state.alignment import copy_at
from elastic.train.state.document import with_properties


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """By name, of each tensor that shares its memory: the first name of that memory."""
    return image.ties(dict(sorted(tensors.items())))


class SharedCopies:
    """Gives each saved tensor to the objects that load it.

    saved: by name, perhaps views of memory that will be overwritten. live: tensors that are where
    they belong, by the name under which they were saved. alignments: of the saved ones, where it
    is not 0.
    """

    def __init__(
        self, saved: Mapping[str, Tensor], live: Mapping[str, Tensor], alignments: Mapping[str, int]
    ) -> None:
        self._saved = saved
        self._alignments = alignments
        self._first = ties(saved)
        self._live = {self._first.get(name, name): tensor for name, tensor in live.items()}
        self._given: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, name: str, properties: dict[str, Any]) -> Tensor:
        """Raises KeyError."""
        first, wanted = self._first.get(name, name), tuple(sorted(properties.items()))
        found = self._given.get((first, wanted))
        if found is None:
            found = self._given[first, wanted] = self._make(first, properties)
        return found

    def _make(self, first: str, properties: dict[str, Any]) -> Tensor:
        live = self._live.get(first)
        if live is None:
            live = self._live[first] = copy_at(self._saved[first], self._alignments.get(first, 0))
        is_it = isinstance(live, nn.Parameter) == bool(properties.get("parameter"))
        if is_it and live.requires_grad == bool(properties.get("requires_grad", False)):
            return live
        return with_properties(live, properties)
