"""Each shard starts from the opening buffers; a computation ends with the mean over shards.

The mean is that of what the buffers became on each shard. For BatchNorm's running averages this is
exactly one update with the mean of the shards' statistics. Integer buffers, such as the number of
batches seen, must be the same on every shard. A buffer that no forward changed keeps its bits.

A forward may write into a buffer or assign another tensor to it. In both cases the module has its
opening tensor again before the next shard, and at the end, with the new value in it. A buffer
outside the state (persistent=False) may be a cache that a forward replaces by one of another size,
but no memory: what it learned would be lost at a resume.

It does not make BatchNorm's forward see the global batch: within a step each shard normalises by
its own statistics, so that they do not depend on which rank holds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from elastic.errors import UsageError
from elastic.reduce.bucket import cut
from elastic.train import structure
from elastic.train.reshaped import sized_by_data
from elastic.train.state import State

HALF_BITS = 32
# S·Σh² and (Σh)² are exact in float64 if S·h fits into 26 bits.
HASH_BITS = 26
MIX = 0x9E3779B97F4A7C15 - 2**64  # odd, from the golden ratio (Knuth's multiplicative hashing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a module has a buffer. Several modules may have the same tensor.

    is_average: of a normalisation of torch, whose buffers of floats are running averages.
    """

    holder: dict[str, Tensor | None]
    name: str
    opening: Tensor | None
    is_average: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What all buffers are at one moment, after one shard's forward.

    present: what each saved place holds. values, versions: of the opening tensors, copies of what
    they hold, and autograd's counts of changes in place. assigned: the value of each opening tensor
    in whose place the forward has put another tensor.
    """

    present: list[Tensor | None]
    values: list[Tensor]
    versions: list[int]
    assigned: dict[int, Tensor]


class Buffers:
    """The buffers of a state's modules, from one gradient computation to the next."""

    def __init__(self, state: State, shards: int, device: torch.device) -> None:
        self._state = state
        self._shards = shards
        self._device = device
        self._holders: list[dict[str, Tensor | None]] = []  # of all modules that have buffers
        self._found: list[Tensor | None] = []  # what they held when the places were found
        self._places: list[Place] = []  # of buffers that are part of the state
        self._outside: list[Place] = []  # of others
        self._caches: list[tuple[Place, Tensor, int]] = []  # their opening content and version
        self._tensors: list[Tensor] = []  # the opening ones, each once
        self._data: list[Tensor] = []  # the same memory, past autograd's count of changes
        self._floats: list[int] = []  # of the saved ones, as indices into `_tensors`
        self._ints: list[int] = []
        self._wide: list[int] = []
        self._weights: dict[int, Tensor] = {}  # of the hashes of so many integers
        self._opening = Contents(present=[], values=[], versions=[], assigned={})
        self.length = 0  # numbers that a shard contributes to the end-of-step all-reduce

    def begin(self) -> None:
        """Take what the buffers hold now as the start of each shard of this computation."""
        self._follow_places()
        self._caches = [
            (place, place.opening.detach().clone(), place.opening._version)  # noqa: SLF001
            for place in self._outside
            if place.opening is not None
        ]
        self._opening = self.save()
        hashes = 2 if self._ints else 0
        self.length = self._count(self._floats) + 2 * self._count(self._ints) + len(self._wide) + hashes

    def _follow_places(self) -> None:
        """Almost always those of the last computation: finding them takes ten times as long."""
        modules = self._state.submodules()
        holders = [held for module in modules if (held := module._buffers)]  # noqa: SLF001 - no public name
        found = structure.values_of(holders)
        if not (structure.same(holders, self._holders) and structure.same(found, self._found)):
            self._holders, self._found = holders, found
            self._find_places([module for module in modules if module._buffers])  # noqa: SLF001
        addresses = [list(map(Tensor.data_ptr, each)) for each in (self._tensors, self._data)]
        if addresses[0] != addresses[1]:  # the recipe gave one other memory
            self._data = [tensor.data for tensor in self._tensors]

    def _find_places(self, modules: list[nn.Module]) -> None:
        """A forward may assign to a buffer, so places count and not tensors."""
        self._places, self._outside = [], []
        for module in modules:
            for name, tensor in module._buffers.items():  # noqa: SLF001
                place = Place(
                    holder=module._buffers,  # noqa: SLF001
                    name=name,
                    opening=tensor,
                    is_average=isinstance(module, _NormBase),
                )
                is_saved = name not in module._non_persistent_buffers_set  # noqa: SLF001
                (self._places if is_saved else self._outside).append(place)
        opening = {id(t): t for place in self._places if (t := place.opening) is not None}
        self._tensors = list(opening.values())
        self._data = [tensor.data for tensor in self._tensors]
        kinds = [t.is_floating_point() or t.is_complex() for t in self._tensors]
        self._floats = [i for i, is_float in enumerate(kinds) if is_float]
        self._ints = [i for i, is_float in enumerate(kinds) if not is_float]
        # The sum is float64. There the mean of S equal float32 (or narrower) values is that value,
        # exactly: the product S·x fits into 53 bits. For float64 buffers it may round, so a flag
        # says whether any shard changed one.
        wide = (torch.float64, torch.complex128)
        self._wide = [i for i in self._floats if self._tensors[i].dtype in wide]
        self._weights = {}

    def save(self) -> Contents:
        """What the buffers are now.

        Raises UsageError where a forward has put into a place what cannot be summed, and where it
        changed a buffer that is not part of the state.
        """
        self._check_caches()
        present = [place.holder.get(place.name) for place in self._places]
        assigned = {
            id(place.opening): tensor
            for place, tensor in zip(self._places, present, strict=True)
            if tensor is not place.opening
        }
        if assigned:
            self._check_assigned(assigned)
        return Contents(
            present=present,
            values=[tensor.detach().clone() for tensor in self._tensors],
            versions=[tensor._version for tensor in self._tensors],  # noqa: SLF001 - autograd's count
            assigned={name: t.detach().clone() for name, t in assigned.items() if t is not None},
        )

    def load(self, contents: Contents | None = None) -> None:
        """Let the buffers be what they were then, by default at the beginning of the computation.

        Autograd's counts of changes go back as well. The graph of an earlier shard may be alive,
        and it finds the buffers as that shard's forward left them, with the same counts: its
        backward does what it would do if no other shard had been computed.
        """
        contents = contents or self._opening
        for place, tensor in zip(self._places, contents.present, strict=True):
            place.holder[place.name] = tensor
        if not self._tensors:
            return
        for tensor, data in zip(self._tensors, self._data, strict=True):
            if tensor.data_ptr() != data.data_ptr():  # `buffer.data = ...` in forward
                tensor.data = data
        try:
            torch._foreach_copy_(self._data, contents.values)  # one call for all
        except RuntimeError:
            self.check_sizes(contents.values)
            raise
        torch._C._autograd._unsafe_set_version_counter(tuple(self._tensors), tuple(contents.versions))  # noqa: SLF001

    def contributions(self, after: Mapping[int, Contents]) -> dict[int, Tensor]:
        """float64 [length] for each shard: what it adds to the end-of-step all-reduce.

        after: by shard. Floats, then the high halves of shard 0's integers, then their low halves,
        then 1 for each float64 buffer that this shard changed, then a hash of all its integers and
        the square of it.
        """
        integers = {shard: self._flat(contents, self._ints).long() for shard, contents in after.items()}
        hashes = self._hashes(torch.stack(list(integers.values()))) if self._ints else ()
        found = {}
        for index, (shard, contents) in enumerate(after.items()):
            parts = [self._flat(contents, self._floats).double()]
            if self._ints:
                parts.append(self._halves(integers[shard], is_counted=shard == 0))
            parts += [
                (self._value(contents, i) != self._opening.values[i]).any().double().reshape(1)
                for i in self._wide
            ]
            if self._ints:
                parts.append(hashes[index])
            found[shard] = torch.cat([part.to(self._device) for part in parts])
            if len(found[shard]) != self.length:
                self.check_sizes(contents.values)
        return found

    @staticmethod
    def _halves(integers: Tensor, *, is_counted: bool) -> Tensor:
        """float64 [2 n] of int64 [n].

        A float64 does not hold every int64 exactly; its high and low 32 bits do fit.
        """
        if not is_counted:
            return integers.new_zeros(2 * len(integers), dtype=torch.float64)
        high = integers >> HALF_BITS
        return torch.cat([high, integers - (high << HALF_BITS)]).double()

    def check_sizes(self, values: list[Tensor] | None = None) -> None:
        """Raises UsageError where a forward gave buffers other sizes. values: theirs, else now."""
        pairs = zip(self._tensors, values or self._tensors, self._opening.values, strict=True)
        if resized := [tensor for tensor, value, opening in pairs if value.shape != opening.shape]:
            raise UsageError(sized_by_data([self._state.name_of(tensor) for tensor in resized]))

    def end(self, total: Tensor) -> None:
        """Set every buffer from the sum of all shards' contributions, float64 [length]."""
        num_floats, num_ints = self._count(self._floats), self._count(self._ints)
        means, high, low, flags = torch.split(
            total[: num_floats + 2 * num_ints + len(self._wide)],
            [num_floats, num_ints, num_ints, len(self._wide)],
        )
        is_changed = dict(zip(self._wide, flags.tolist(), strict=True))
        integers = (high.long() << HALF_BITS) + low.long()
        self.load()
        with torch.no_grad():
            for which, flat in ((self._floats, means / self._shards), (self._ints, integers)):
                tensors = [self._real(self._tensors[i]) for i in which]
                for i, tensor, value in zip(which, tensors, cut(flat, tensors), strict=True):
                    if is_changed.get(i) != 0:
                        tensor.copy_(value)

    def averaged(self, contents: Contents) -> list[str]:
        """The names of buffers, after `end`, whose shards had other values than their mean.

        contents: after one of this rank's shards. Normalisations of torch do not count.
        """
        index = {id(self._tensors[i]): i for i in self._floats}
        names = []
        for place in self._places:
            i = index.get(id(place.opening))
            if i is not None and not place.is_average:
                value = self._value(contents, i)
                if not torch.equal(value, self._tensors[i]) and not value.isnan().any():
                    names.append(self._name(place))
        return names

    def have_same_integers(self, total: Tensor) -> bool:
        """Whether the integers of all shards are the same, from the sum of the contributions.

        By the inequality of Cauchy and Schwarz, S·Σh² = (Σh)² only where all h are equal.
        """
        return not self._ints or bool(self._differ(total[-2:].view(1, 2)).sum() == 0)

    def hashes(self, contents: Contents) -> Tensor:
        """float64 [integer buffers, 2]: as the hash in a contribution, but one for each buffer."""
        rows = [self._hashes(self._value(contents, i).reshape(1, -1).long()) for i in self._ints]
        return torch.cat(rows).to(self._device)

    def different_integers(self, total: Tensor) -> list[str]:
        """The names of the buffers whose integers differ, from the sum of all shards' `hashes`."""
        different = self._differ(total).tolist()
        tensors = [self._tensors[i] for i in self._ints]
        return [
            self._state.name_of(tensor) for tensor, is_so in zip(tensors, different, strict=True) if is_so
        ]

    def _differ(self, total: Tensor) -> Tensor:
        sums, squares = total.unbind(1)
        return self._shards * squares != sums.square()

    def _hashes(self, rows: Tensor) -> Tensor:
        """float64 [rows, 2]: h of each row of int64 [rows, n], and h²."""
        count = rows.shape[1]
        if count not in self._weights:
            self._weights[count] = torch.arange(1, count + 1, device=rows.device) * MIX
        bits = HASH_BITS - (self._shards - 1).bit_length()
        h = ((rows * self._weights[count]).sum(1) >> HALF_BITS & ((1 << bits) - 1)).double()
        return torch.stack([h, h * h], dim=1)

    def _check_assigned(self, assigned: dict[int, Tensor | None]) -> None:
        """Forward put other tensors, or none, into the places of these opening ones."""
        for place in self._places:
            if id(place.opening) not in assigned:
                continue
            found = place.holder.get(place.name)
            if place.opening is not None and found is not assigned[id(place.opening)]:
                raise UsageError(
                    f"forward assigned a tensor to one of several buffers that were one tensor, among them {self._name(place)}; "
                    "write into the tensor (copy_), or give each module a buffer of its own"
                )
            if _described(found) != _described(place.opening):
                raise UsageError(
                    f"forward gave buffer {self._name(place)} {_described(found)} where it was {_described(place.opening)} at the step's beginning; "
                    "a buffer that forward assigns keeps its shape and type: give it these in __init__, or register it with persistent=False if it is a cache"
                )

    def _check_caches(self) -> None:
        """Forward did not use a buffer that is no part of the state as a memory."""
        for place, content, version in self._caches:
            found = place.holder.get(place.name)
            if found is None or (found is place.opening and found._version == version):  # noqa: SLF001
                continue
            if _described(found) == _described(content) and not torch.equal(found, content):
                raise UsageError(
                    f"forward changed buffer {self._name(place)}, which is no part of the state (persistent=False), so that a resume would "
                    "begin with another value; register it with persistent=True, or keep what lasts for one forward in a plain variable"
                )

    def _name(self, place: Place) -> str:
        return self._state.name_of_place(place.holder, place.name)

    def _value(self, contents: Contents, i: int) -> Tensor:
        return contents.assigned.get(id(self._tensors[i]), contents.values[i])

    def _flat(self, contents: Contents, which: list[int]) -> Tensor:
        """[numbers]: the values of these buffers one after another; complex ones as pairs."""
        values = [self._real(self._value(contents, i)).reshape(-1) for i in which]
        return torch.cat(values) if values else torch.zeros(0)

    def _count(self, which: list[int]) -> int:
        return sum(self._real(self._tensors[i]).numel() for i in which)

    @staticmethod
    def _real(tensor: Tensor) -> Tensor:
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _described(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
