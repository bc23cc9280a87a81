"""Which tensors are buffers of the state where a computation begins, and which places have them.

Places count and not tensors: a forward may assign another tensor to a buffer.
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from elastic.train.state import structure
from elastic.train.step.buffer_places import BufferPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What all buffers are at one moment, after one shard's forward.

    present: what each saved place holds. values, versions: of the opening tensors, copies of what
    they hold, and autograd's counts of changes in place. Where nothing has changed a still one, its
    copy is that of before. assigned: the value of each opening tensor in whose place the forward
    has put another tensor.
    """

    present: list[Tensor | None]
    values: list[Tensor]
    versions: list[int]
    assigned: dict[int, Tensor]


class OpeningBuffers:
    """Of the modules of one state, followed from one computation to the next.

    places: of buffers that are part of the state. holders, names: theirs. outside: places of other
    buffers. tensors: the opening ones, each once. data: the same memory, past autograd's count of
    changes. is_new: the places were looked for again, and their contents are compared until the
    computation ends.
    """

    def __init__(self) -> None:
        self.places: list[BufferPlace] = []
        self.outside: list[BufferPlace] = []
        self.holders: list[dict[str, Tensor | None]] = []
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.data: list[Tensor] = []
        self.is_new = True
        self._holders: list[dict[str, Tensor | None]] = []  # of all modules that have buffers
        self._found: list[Tensor | None] = []  # what they held when the places were found
        self._addresses: list[int] = []  # of the memory

    def follow(self, modules: list[nn.Module]) -> bool:
        """Take what the modules have now; returns whether some tensor has other memory.

        Places are almost always those of before, and finding them takes ten times as long.
        """
        holders = [module._buffers for module in modules]  # noqa: SLF001 - no public name
        found = structure.values_of(holders)
        if not (structure.same(holders, self._holders) and structure.same(found, self._found)):
            self._holders, self._found = holders, found
            self._find(modules)
        addresses = list(map(Tensor.data_ptr, self.tensors))
        has_moved = addresses != self._addresses
        if has_moved:  # the recipe gave one other memory
            self._addresses = addresses
            self.data = [tensor.data for tensor in self.tensors]
        return has_moved

    def replace(self, written: dict[int, Tensor], assigned: dict[int, Tensor | None]) -> None:
        """Other tensors are the opening ones from here on.

        written: by their number. assigned: to the places of tensors, by the ids of these.
        """
        self.places = [
            replace(place, opening=assigned.get(id(place.opening), place.opening)) for place in self.places
        ]
        for i, tensor in written.items():
            self.tensors[i], self.data[i] = tensor, tensor.data

    def _find(self, modules: list[nn.Module]) -> None:
        self.places, self.outside = [], []
        for module in modules:
            for name, tensor in module._buffers.items():  # noqa: SLF001
                place = BufferPlace(
                    holder=module._buffers,  # noqa: SLF001
                    name=name,
                    opening=tensor,
                    is_saved=name not in module._non_persistent_buffers_set,  # noqa: SLF001
                    is_average=isinstance(module, _NormBase),
                )
                (self.places if place.is_saved else self.outside).append(place)
        self.holders = [place.holder for place in self.places]
        self.names = [place.name for place in self.places]
        opening = {id(t): t for place in self.places if (t := place.opening) is not None}
        self.tensors = list(opening.values())
        self.data, self._addresses = [], []
        self.is_new = True
