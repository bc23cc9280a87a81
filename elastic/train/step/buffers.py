"""Each shard starts from the opening buffers; a computation ends with the mean over shards.

The mean is that of what the buffers became on each shard. For BatchNorm's running averages this is
exactly one update with the mean of the shards' statistics. Integer buffers, such as the number of
batches seen, must be the same on every shard. A buffer that no forward changed keeps its bits.

A large buffer (a mask, a table of positions) is neither copied for each shard nor part of the sum
until a forward changes it. The sum says whether a shard did: then the ranks sum it at once, in a
message more, and from then on in every step. Torch counts changes. What it does not count (writes
through `.data`) is found in large buffers in the first computation alone, by comparing contents.

A forward may write into a buffer or assign another tensor to it. In both cases the module has its
opening tensor again before the next shard, and at the end, with the new value in it.

It does not make BatchNorm's forward see the global batch: within a step each shard normalises by
its own statistics, so that they do not depend on which rank holds it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from elastic.errors import UsageError
from elastic.train.state import structure
from elastic.train.state.state import State
from elastic.train.step.buffer_sums import BufferSums

LARGE_NUMBERS = 2**14  # of a buffer that counts as large
_FORM = attrgetter("shape", "dtype")
_VERSION = attrgetter("_version")  # autograd's count of changes in place


class BufferPlace(NamedTuple):
    """Where a module has a buffer. Several modules may have the same tensor.

    number: of the opening tensor among those of all places; None where there is none. is_average:
    of a normalisation of torch, whose buffers are running averages and their count.
    """

    holder: dict[str, Tensor | None]
    name: str
    opening: Tensor | None
    number: int | None
    is_average: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What all buffers are at one moment, after one shard's forward.

    present: what each place holds. values, versions: of the opening tensors, what they hold, and
    autograd's counts of changes in place. left: what the shard gives to the sum: for each opening
    tensor its value, or that of the tensor that forward put in its place.
    """

    present: list[Tensor | None]
    values: list[Tensor]
    versions: list[int]
    left: list[Tensor]


_NONE = Contents(present=[], values=[], versions=[], left=[])


class Buffers:
    """The buffers of a state's modules, from one gradient computation to the next.

    opening: what a shard begins with that the step has not computed yet. sums: what the shards'
    contributions consist of. is_any: whether the modules have places for buffers.
    """

    def __init__(self, state: State, shards: int, device: torch.device) -> None:
        self._state = state
        self._shards = shards
        self._device = device
        self._modules: list[nn.Module] = []
        self._holders: list[dict[str, Tensor | None]] = []  # of all of them
        self._found: list[Tensor | None] = []  # what they held when the places were found
        self._places: list[BufferPlace] = []  # of buffers of the state
        self._tensors: list[Tensor] = []  # the opening ones, each once
        self._averages: set[int] = set()  # by their numbers
        self._opened: list[Tensor | None] = []  # of the places, in their order
        self._addresses: list[int] = []
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._views: list[Tensor] = []  # the same memory, past autograd's count of changes
        self.is_any = False
        self._is_first = True  # since the places were found, no computation has ended
        self._large: list[int] = []  # large ones that no forward of this rank has changed
        self._groups: list[tuple[list[int], list[Tensor], list[int]]] = []  # the others, by type
        self.opening = _NONE
        self.sums = BufferSums([], set(), shards, device)

    def begin(self, modules: list[nn.Module]) -> None:
        """Take what the buffers hold now as the start of each shard of this computation.

        modules: all of the state, in the list of the last call where none has other buffers now.
        """
        if modules is not self._modules:
            self._modules = modules
            holders = [module._buffers for module in modules]  # noqa: SLF001 - no public name
            found = structure.values_of(holders)
            if not (structure.same(holders, self._holders) and structure.same(found, self._found)):
                self._holders, self._found = holders, found
                self._find()
        if not self.is_any:
            return
        addresses = list(map(Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:  # the recipe gave one other memory
            self._addresses = addresses
            self._views = [t.data.view(-1) if t.is_contiguous() else t.data for t in self._tensors]
            forms = list(map(_FORM, self._tensors))
            if forms != self._forms:
                self._forms = forms
                small = {i for i, tensor in enumerate(self._tensors) if tensor.numel() < LARGE_NUMBERS}
                self._divide(small | self._averages)
            self._group()
        values = [*self._views]
        for i in self._large:
            values[i] = values[i].clone()
        self._copy(values)
        self.opening = Contents(
            present=self._opened, values=values, versions=list(map(_VERSION, self._tensors)), left=values
        )

    def _find(self) -> None:
        self._places, numbers = [], dict[int, int]()  # by the id of a tensor
        for module in self._modules:
            for name, tensor in module._buffers.items():  # noqa: SLF001
                if name not in module._non_persistent_buffers_set:  # noqa: SLF001
                    number = None if tensor is None else numbers.setdefault(id(tensor), len(numbers))
                    is_average = isinstance(module, _NormBase)
                    self._places.append(BufferPlace(module._buffers, name, tensor, number, is_average))  # noqa: SLF001
        self.is_any = bool(self._places)
        self._tensors = list({id(t): t for p in self._places if (t := p.opening) is not None}.values())
        self._opened = [place.opening for place in self._places]
        self._averages = {p.number for p in self._places if p.is_average and p.number is not None}
        self._addresses, self._is_first = [], True  # so that all else is looked at as well
        if not self.is_any:
            self._forms = []
            self._divide(set())
            self.opening = _NONE

    def _divide(self, summed: set[int]) -> None:
        """summed: the same on every rank, by sizes, types and what earlier sums have told."""
        self.sums = BufferSums(self._tensors, summed, self._shards, self._device)
        self._large = [i for i in range(len(self._tensors)) if i not in summed]

    def _group(self) -> None:
        """Those that are copied for each shard; many small ones of one type by a few calls.

        A model has more buffers than anything else that is copied (159 in a ResNet-50), most of
        them with a few numbers: one call for each would cost more than the bytes.
        """
        alike: dict[object, list[int]] = {}
        for i, view in enumerate(self._views):
            if i not in self._large:
                alike.setdefault((view.dtype, view.device) if view.ndim == 1 else i, []).append(i)
        self._groups = [
            (group, [self._views[i] for i in group], [len(self._views[i]) for i in group])
            for group in alike.values()
        ]

    def _copy(self, values: list[Tensor]) -> None:
        """Put copies of what memory holds now among the values."""
        for group, views, sizes in self._groups:
            for i, part in zip(group, torch.cat(views).split_with_sizes(sizes), strict=True):
                values[i] = part

    def save(self) -> Contents:
        """What the buffers are now.

        Raises UsageError where a forward has put into a place what cannot be summed.
        """
        if changed := {i for i in self._large if self._has_changed(i)}:
            self._large = [i for i in self._large if i not in changed]
            self._group()
        values = list(self.opening.values)
        if list(map(Tensor.data_ptr, self._tensors)) == self._addresses:
            self._copy(values)
        else:  # `buffer.data = ...` in forward, or `resize_`
            pairs = zip(self._tensors, self._forms, strict=True)
            if resized := [tensor for tensor, form in pairs if _FORM(tensor) != form]:
                raise UsageError(
                    f"forward gave buffer {self._state.name_of(resized[0])} another size than it had in the State: give it its final shape in __init__, "
                    "or run one forward on a fixed batch before elastic.State, with torch.no_grad()"
                )
            for i, tensor in enumerate(self._tensors):
                if i not in self._large:
                    values[i] = tensor.detach().clone().reshape(values[i].shape)
        present = [place.holder.get(place.name) for place in self._places]
        left = values if structure.same(present, self._opened) else self._assigned(present, values)
        versions = list(map(_VERSION, self._tensors))
        return Contents(present=present, values=values, versions=versions, left=left)

    def _has_changed(self, i: int) -> bool:
        """Whether a large buffer has another content than at the beginning."""
        tensor, opening = self._tensors[i], self.opening
        is_same = tensor._version == opening.versions[i] and tensor.data_ptr() == self._addresses[i]  # noqa: SLF001
        return not is_same or (self._is_first and bool((self._views[i] != opening.values[i]).any()))

    def _assigned(self, present: list[Tensor | None], values: list[Tensor]) -> list[Tensor]:
        """The values, and those of other tensors that a forward has put into places.

        Raises UsageError for what cannot be summed.
        """
        left, of_tensors = list(values), dict[int, Tensor | None]()
        for place, tensor in zip(self._places, present, strict=True):
            number = place.number
            if number is not None and of_tensors.setdefault(number, tensor) is not tensor:
                raise UsageError(
                    f"forward assigned a tensor to one of several buffers that were one tensor, among them {self._name(place)}; "
                    "write into the tensor (copy_), or give each module a buffer of its own"
                )
            if tensor is place.opening:
                continue
            if number is None or tensor is None or _form(tensor) != _form(place.opening):
                raise UsageError(
                    f"expected buffer {self._name(place)} to stay {_form(place.opening)}, found {_form(tensor)} assigned by forward; "
                    "give it these in __init__, or register it with persistent=False if it is a cache"
                )
            left[number] = tensor.detach().clone().reshape(values[number].shape)
        return left

    def check_backward(self, after: Contents) -> None:
        """In an audited step. Raises UsageError where a backward changed what forward left.

        Activation checkpointing runs the forward again, which moves averages of normalisations a
        second time in a backward: no gradient sees that, and the next load puts them back.
        """
        pairs = enumerate(zip(self.save().left, after.left, strict=True))
        changed = {i for i, (now, before) in pairs if not _are_same(now, before)} - self._averages
        if changed:
            raise UsageError(
                f"expected buffers to stay as forward left them while gradients are computed, found another content in {self._named(changed)}; "
                "change them in the forward, outside checkpointed parts, or in the loop's body"
            )

    def load(self, contents: Contents | None = None) -> None:
        """Let the buffers be what they were then, by default at the beginning of the computation.

        Autograd's counts of changes go back as well. The graph of an earlier shard may be alive,
        and it finds the buffers as that shard's forward left them, with the same counts: its
        backward does what it would do if no other shard had been computed.
        """
        contents = contents or self.opening
        for place, held in zip(self._places, contents.present, strict=True):
            place.holder[place.name] = held
        if not self._tensors:
            return
        if list(map(Tensor.data_ptr, self._tensors)) != self._addresses:  # `buffer.data = ...`
            for tensor, view, (shape, _) in zip(self._tensors, self._views, self._forms, strict=True):
                tensor.data = view.view(shape)
        now = list(map(_VERSION, self._tensors))
        still = {i for i in self._large if now[i] == contents.versions[i]}
        which = [i for i in range(len(now)) if i not in still]
        if which:
            torch._foreach_copy_([self._views[i] for i in which], [contents.values[i] for i in which])
        torch._C._autograd._unsafe_set_version_counter(tuple(self._tensors), tuple(contents.versions))  # noqa: SLF001

    def check_body(self) -> None:
        """Between a sum and the gradients. Raises UsageError where the loop's body has changed a
        buffer, which the next `load` would put back, as far as torch counts or it was assigned.

        The body may call a model there: averages of normalisations are put back without a word.
        """
        assigned = (p.number for p in self._places if p.holder.get(p.name) is not p.opening)
        changed = {number for number in assigned if number is not None}
        versions = zip(map(_VERSION, self._tensors), self.opening.versions, strict=True)
        changed |= {i for i, (now, before) in enumerate(versions) if now != before}
        if changed - self._averages:
            raise UsageError(
                f"the loop's body changed {self._named(changed - self._averages)} between a sum and the gradients, whose shards all begin with what the "
                "step began with; change it after the gradients, or before the first sum"
            )

    def contributions(self, after: Mapping[int, Contents]) -> dict[int, Tensor]:
        """float64 [sums.length] for each shard: what it adds to the end-of-step all-reduce.

        after: by shard.
        """
        return self.sums.contributions({shard: c.left for shard, c in after.items()}, self.opening.values)

    def found_changes(self, signs: list[float]) -> bool:
        """Whether a shard of any rank changed a large buffer for the first time.

        signs: read from `sums.signs`. If so, the same is to be summed once more, with other
        contributions.
        """
        found = self.sums.changed(signs) - self.sums.summed
        if found:
            self._divide(self.sums.summed | found)
            self._group()
        return bool(found)

    def end(self, total: Tensor, signs: list[float], after: Contents) -> None:
        """Set every buffer from the sum of all shards' contributions, float64 [sums.length].

        signs: read from its `sums.signs`. after: what the buffers were after one of the shards.
        """
        self.load()
        self.sums.use(self._tensors, total, signs, after.left)
        self._is_first = False

    def averaged(self, contents: Contents) -> list[str]:
        """The names of buffers, after `end`, whose shards had other values than their mean.

        contents: after one of this rank's shards. Normalisations of torch do not count.
        """
        floats = set(self.sums.floats) - self._averages
        return self._names({i for i in floats if not _are_same(contents.left[i], self._views[i])})

    def changed_integers(self, after: Iterable[Contents]) -> str:
        """The names of those that may differ between shards, as far as this rank sees."""
        opening, lefts = self.opening.values, [each.left for each in after]
        changed = {i for i in self.sums.integers if any(not _are_same(left[i], opening[i]) for left in lefts)}
        return self._named(changed - self._averages or changed)

    def _name(self, place: BufferPlace) -> str:
        return self._state.name_of_place(place.holder, place.name)

    def _named(self, which: set[int]) -> str:
        return ", ".join(self._names(which))

    def _names(self, which: set[int]) -> list[str]:
        return [self._name(place) for place in self._places if place.number in which]


def _are_same(one: Tensor, other: Tensor) -> bool:
    """NaNs are."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _form(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
