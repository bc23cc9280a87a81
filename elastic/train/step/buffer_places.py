"""Where modules have buffers, and what a forward may put there.

A forward may assign another tensor to a buffer, so that places count and not tensors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.errors import UsageError
from elastic.train.state.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlace:
    """Where a module has a buffer. Several modules may have the same tensor.

    is_saved: as part of the state. is_average: of a normalisation of torch, whose buffers of floats
    are running averages.
    """

    holder: dict[str, Tensor | None]
    name: str
    opening: Tensor | None
    is_saved: bool
    is_average: bool


Cache = tuple[BufferPlace, Tensor, int]  # no part of the state: with its opening content and version


def check_assigned(places: Iterable[BufferPlace], assigned: dict[int, Tensor | None], state: State) -> None:
    """Forward put other tensors, or none, into the places of these opening ones.

    Raises UsageError for what cannot be summed.
    """
    for place in places:
        if id(place.opening) not in assigned:
            continue
        found = place.holder.get(place.name)
        if place.opening is not None and found is not assigned[id(place.opening)]:
            raise UsageError(
                f"forward assigned a tensor to one of several buffers that were one tensor, among them {_name(place, state)}; "
                "write into the tensor (copy_), or give each module a buffer of its own"
            )
        if _described(found) != _described(place.opening):
            raise UsageError(
                f"forward gave buffer {_name(place, state)} {_described(found)} where it was {_described(place.opening)} at the step's beginning; "
                "a buffer that forward assigns keeps its shape and type: give it these in __init__, or register it with persistent=False if it is a cache"
            )


def check_caches(caches: Iterable[Cache], state: State) -> None:
    """Forward did not use a buffer that is no part of the state as a memory. Raises UsageError."""
    for place in changed_caches(caches):
        raise UsageError(
            f"forward changed buffer {_name(place, state)}, which is no part of the state (persistent=False), so that a resume would "
            "begin with another value; register it with persistent=True, or keep what lasts for one forward in a plain variable"
        )


def changed_caches(caches: Iterable[Cache]) -> Iterator[BufferPlace]:
    """Those that have another content of the same form; another form is that of a new cache."""
    for place, content, version in caches:
        found = place.holder.get(place.name)
        if found is None or (found is place.opening and found._version == version):  # noqa: SLF001
            continue
        if _described(found) == _described(content) and not torch.equal(found, content):
            yield place


def _name(place: BufferPlace, state: State) -> str:
    return state.name_of_place(place.holder, place.name)


def _described(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
