"""A backward leaves the buffers as the forward left them, but for averages of normalisations.

What a shard's forward left is what counts, and the next shard begins with the opening buffers. What
a hook, or a function of autograd's, writes while gradients are computed would be lost, unseen.

Activation checkpointing runs the forward again. The averages of torch's normalisations move a
second time then, which no gradient sees, and count once. Any other buffer that does is refused: the
second forward finds what the first one left, so that its gradients are those of another forward.

Autograd counts changes. What it does not count (writes through `.data`) is found where contents are
compared: in the first computation with these places, and in audited steps.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from elastic.train import structure
from elastic.train.buffer_places import BufferPlace
from elastic.train.same_bits import differ

AVERAGES = ("running_mean", "running_var", "num_batches_tracked")  # as torch's normalisations call them
_VERSION, _NONE = repeat("_version"), repeat(0)

Marks = list[int]  # of what the places hold: identities, then counts of changes


class WatchedPlaces:
    """Those of these places that no backward may change.

    is_known: a whole computation has compared their contents.
    """

    def __init__(self, places: Sequence[BufferPlace]) -> None:
        self.places = [place for place in places if not (place.is_average and place.name in AVERAGES)]
        self.holders = [place.holder for place in self.places]
        self.names = [place.name for place in self.places]
        self._found: list[Tensor | None] = []  # of the last marks: no other tensor gets their ids
        self.is_known = False

    def follow(self, former: "WatchedPlaces") -> "WatchedPlaces":
        """Itself, in the place of the former, whose places may be the same."""
        is_same = structure.same(self.holders, former.holders) and self.names == former.names
        self.is_known = former.is_known and is_same
        return self

    def marks(self) -> Marks:
        """Other ones as soon as a place holds another tensor, or one that was written to.

        Without a call of Python for a place: it is asked twice for each shard.
        """
        found: list[Any] = list(map(dict.get, self.holders, self.names))
        marks = [*map(id, found), *map(getattr, found, _VERSION, _NONE)]
        self._found = found
        return marks

    def marked(self, before: Marks, after: Marks) -> Iterator[BufferPlace]:
        """Those whose marks differ."""
        number = len(self.places)
        for i, place in enumerate(self.places):
            if before[i] != after[i] or before[number + i] != after[number + i]:
                yield place


def differing(places: Sequence[tuple[BufferPlace, Tensor | None]]) -> list[BufferPlace]:
    """Those that do not hold a tensor of this content, or None, after one wait for the device."""
    flags = [_differs(place.holder.get(place.name), content) for place, content in places]
    if not flags:
        return []
    told = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return [place for (place, _), is_other in zip(places, told, strict=True) if is_other]


def _differs(found: Tensor | None, content: Tensor | None) -> Tensor:
    if found is None or content is None or _form(found) != _form(content):
        return torch.tensor(found is not content)
    return differ(found, content)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def changed_in_backward(names: list[str]) -> str:
    """What the user reads. names: of the buffers."""
    return (
        f"expected the buffers to stay as the forward left them while gradients are computed, found another content in {', '.join(names)}: a hook or "
        "a function of autograd has written there, or activation checkpointing, which runs the forward again. The next shard, perhaps on another worker, "
        "would not begin with it. Change such a buffer in the forward, outside of what is checkpointed, or in the loop's body, after step.mean_loss or step.backward"
    )
