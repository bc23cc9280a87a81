"""Each shard starts from the opening buffers; a computation ends with the mean over shards.

The mean is that of what the buffers became on each shard. For BatchNorm's running averages this is
exactly one update with the mean of the shards' statistics. Integer buffers, such as the number of
batches seen, must be the same on every shard. A buffer that no forward changed keeps its bits.

A large buffer that no forward has changed yet (a mask, a table of positions) is *still*: it is
neither saved and loaded for each shard nor part of the sum, which says of it only whether a shard
changed it. If one did, the ranks sum it at once, in a message more, and from then on in every step.
Torch counts changes. What it does not count (writes through `.data`, and into the running averages
of its own normalisations) is found in the first computation by comparing contents after each shard,
and refused where it is found later.

A forward may write into a buffer or assign another tensor to it. In both cases the module has its
opening tensor again before the next shard, and at the end, with the new value in it. A buffer
outside the state (persistent=False) may be a cache that a forward replaces by one of another size,
but no memory: what it learned would be lost at a resume.

It does not make BatchNorm's forward see the global batch: within a step each shard normalises by
its own statistics, so that they do not depend on which rank holds it.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from elastic.errors import UsageError
from elastic.train.state.state import State
from elastic.train.step.buffer_copies import BufferCopies
from elastic.train.step.buffer_places import Cache, changed_caches, check_assigned, check_caches
from elastic.train.step.buffer_sums import BufferSums
from elastic.train.step.opening_buffers import Contents, OpeningBuffers
from elastic.train.step.same_bits import differ

STILL_NUMBERS = 2**14  # of a buffer that counts as large
_VERSION = attrgetter("_version")  # autograd's count of changes in place
# As torch's normalisations call them. Activation checkpointing runs the forward again, which moves
# them a second time in a backward: no gradient sees that, and the next load puts them back.
_AVERAGES = ("running_mean", "running_var", "num_batches_tracked")


class Buffers:
    """The buffers of a state's modules, from one gradient computation to the next."""

    def __init__(self, state: State, shards: int, device: torch.device) -> None:
        self._state = state
        self._shards = shards
        self._device = device
        self._openings = OpeningBuffers()
        self._caches: list[Cache] = []
        self._sizes: list[int] = []  # of them, in numbers
        self._moving: list[int] = []  # what each shard's forward may change, as indices into them
        self._still: list[int] = []
        self._moved: dict[int, Tensor] = {}  # large ones that a forward has changed, by id
        self._sums, self._copies = BufferSums([], shards, device), BufferCopies([])
        self._opening = Contents(present=[], values=[], versions=[], assigned={})
        self._held = self._opening  # what memory has, if nothing has changed a buffer since
        self.length = 0  # numbers that a shard contributes to the end-of-step all-reduce

    def begin(self, modules: list[nn.Module] | None = None) -> None:
        """Take what the buffers hold now as the start of each shard of this computation.

        modules: all of the state, for a caller that has them. Raises UsageError for a buffer whose
        elements share memory: no content can be loaded into it.
        """
        modules = self._state.submodules() if modules is None else modules
        if self._openings.follow(modules):
            self._sizes = []
        sizes = list(map(Tensor.numel, self._openings.tensors))
        if sizes != self._sizes:
            self._check_elements()
            self._sizes = sizes
            self._divide()
        self._caches = [
            (place, place.opening.detach().clone(), place.opening._version)  # noqa: SLF001
            for place in self._openings.outside
            if place.opening is not None
        ]
        values = list(self._openings.tensors)
        self._copy([*self._still], values)
        self._opening = self._held = Contents(
            present=[place.opening for place in self._openings.places],
            values=values,
            versions=[tensor._version for tensor in self._openings.tensors],  # noqa: SLF001 - autograd's count
            assigned={},
        )

    def _check_elements(self) -> None:
        """Raises UsageError, before a step, a resume or a snapshot fails with torch's own error."""
        if shared := [tensor for tensor in self._openings.tensors if _is_expanded(tensor)]:
            names = ", ".join(map(self._state.name_of, shared))
            raise UsageError(
                f"expected buffers of which each element has memory of its own, found one element several times in {names}, as expand makes it: "
                "nothing can be written into such a buffer. Register a copy, tensor.expand(...).clone(), or persistent=False for what no state needs"
            )

    def _divide(self) -> None:
        """Alike on every rank: by sizes, types and what earlier sums have told."""
        averages = {id(place.opening) for place in self._openings.places if place.is_average}
        self._moved = {id(t): t for t in self._openings.tensors if id(t) in self._moved}
        is_moving = [
            size < STILL_NUMBERS or id(tensor) in averages or id(tensor) in self._moved
            for tensor, size in zip(self._openings.tensors, self._sizes, strict=True)
        ]
        self._moving = [i for i, moves in enumerate(is_moving) if moves]
        self._still = [i for i, moves in enumerate(is_moving) if not moves]
        self._copies = BufferCopies([self._openings.tensors[i] for i in self._moving])
        self._sums = BufferSums([self._openings.tensors[i] for i in self._moving], self._shards, self._device)
        self.length = self._sums.length + 2 * len(self._still)

    def save(self) -> Contents:
        """What the buffers are now.

        Raises UsageError where a forward has put into a place what cannot be summed, and where it
        changed a buffer that is not part of the state.
        """
        if self._caches:
            check_caches(self._caches, self._state)
        present = list(map(dict.get, self._openings.holders, self._openings.names))
        assigned = {
            id(place.opening): tensor
            for place, tensor in zip(self._openings.places, present, strict=True)
            if tensor is not place.opening
        }
        if assigned:
            check_assigned(self._openings.places, assigned, self._state)
        values = list(self._held.values)
        self._copy([*filter(self._has_changed, self._still)], values)
        self._held = Contents(
            present=present,
            values=values,
            versions=list(map(_VERSION, self._openings.tensors)),
            assigned={name: t.detach().clone() for name, t in assigned.items() if t is not None}
            if assigned
            else {},
        )
        return self._held

    def check_backward(self) -> None:
        """In an audited step. Raises UsageError where a backward changed what was last saved."""
        index = {id(tensor): i for i, tensor in enumerate(self._openings.tensors)}
        changed = [*changed_caches(self._caches)]
        for place in self._openings.places:
            i, found = index.get(id(place.opening)), place.holder.get(place.name)
            if i is None or found is None or (place.is_average and place.name in _AVERAGES):
                continue
            content = self._value(self._held, i)
            is_alike = (found.shape, found.dtype) == (content.shape, content.dtype)
            if not is_alike or bool(differ(found, content)):
                changed.append(place)
        if changed:
            self.check_sizes()  # a forward that resizes has left it so, and memory holds no copy
            names = [self._state.name_of_place(place.holder, place.name) for place in changed]
            raise UsageError(
                f"expected the buffers to stay as the forward left them while gradients are computed, found another content in {', '.join(names)}: a hook or "
                "a function of autograd has written there, or activation checkpointing, which runs the forward again. The next shard, perhaps on another worker, "
                "would not begin with it. Change such a buffer in the forward, outside of what is checkpointed, or in the loop's body, after step.mean_loss or step.backward"
            )

    def _copy(self, still: list[int], values: list[Tensor]) -> None:
        """Put copies of what is there now among the values. still: which of those as well."""
        tensors = self._openings.tensors
        for i, copy in zip(self._moving, self._copies.take([tensors[i] for i in self._moving]), strict=True):
            values[i] = copy
        for i in still:
            values[i] = tensors[i].detach().clone()

    def _has_changed(self, i: int) -> bool:
        """Whether this still buffer has another content than when it was last saved or loaded."""
        tensor, data, value = self._openings.tensors[i], self._openings.data[i], self._held.values[i]
        return (
            tensor._version != self._held.versions[i]  # noqa: SLF001 - autograd's count
            or tensor.data_ptr() != data.data_ptr()
            or tensor.shape != value.shape
            or (self._openings.is_new and bool(differ(tensor, value)))
        )

    def load(self, contents: Contents | None = None) -> None:
        """Let the buffers be what they were then, by default at the beginning of the computation.

        Autograd's counts of changes go back as well. The graph of an earlier shard may be alive,
        and it finds the buffers as that shard's forward left them, with the same counts: its
        backward does what it would do if no other shard had been computed.
        """
        contents = contents or self._opening
        for place, tensor in zip(self._openings.places, contents.present, strict=True):
            place.holder[place.name] = tensor
        if not self._openings.tensors:
            return
        held = self._held.values
        which = [i for i in self._still if contents.values[i] is not held[i] or self._has_changed(i)]
        which += self._moving
        for tensor, data in zip(self._openings.tensors, self._openings.data, strict=True):
            if tensor.data_ptr() != data.data_ptr():  # `buffer.data = ...` in forward
                tensor.data = data
        try:
            if which:  # one call for all
                torch._foreach_copy_(
                    [self._openings.data[i] for i in which], [contents.values[i] for i in which]
                )
        except RuntimeError:
            self.check_sizes(contents.values)
            raise
        tensors, versions = tuple(self._openings.tensors), tuple(contents.versions)
        torch._C._autograd._unsafe_set_version_counter(tensors, versions)  # noqa: SLF001
        self._held = contents

    @property
    def opening(self) -> Contents:
        """What a shard begins with that the step has not computed yet."""
        return self._opening

    def follow_body(self, after: Sequence[Contents]) -> list[Contents]:
        """What the loop's body has written since `load` is the start of each shard from here on.

        after: what the step's earlier passes left. Returns the same with what was written, which is
        seen where it is counted or assigned. The averages of normalisations are put back: the body
        may call a model between a sum and the gradients. Raises UsageError where a shard has
        changed the same buffer, and for a tensor that no sum takes.
        """
        assigned = {
            id(place.opening): tensor
            for place in self._openings.places
            if (tensor := place.holder.get(place.name)) is not place.opening
        }
        versions = [tensor._version for tensor in self._openings.tensors]  # noqa: SLF001 - autograd's count
        if not assigned and versions == self._opening.versions:
            return list(after)
        averages = {id(place.opening) for place in self._openings.places if place.is_average}
        if assigned:
            check_assigned(self._openings.places, assigned, self._state)
        written: dict[int, Tensor] = {}
        for i, (tensor, version) in enumerate(zip(self._openings.tensors, versions, strict=True)):
            is_written = version != self._opening.versions[i] and id(tensor) not in averages
            if is_written or id(tensor) in assigned:
                opening = self._opening.values[i]
                if any(bool(differ(self._value(each, i), opening)) for each in after):
                    raise UsageError(self._changed_by_both(tensor))
                now = assigned.get(id(tensor), tensor)
                assert now is not None, "check_assigned refuses None in the place of a tensor"
                written[i] = now
        return self._write(written, assigned, after)

    def _write(
        self, written: dict[int, Tensor], assigned: dict[int, Tensor | None], after: Sequence[Contents]
    ) -> list[Contents]:
        values = {i: tensor.detach().clone() for i, tensor in written.items()}
        was = [id(place.opening) for place in self._openings.places]
        for i, tensor in written.items():
            if id(self._openings.tensors[i]) in self._moved:
                self._moved[id(tensor)] = tensor
        self._openings.replace(written, assigned)

        def with_it(contents: Contents) -> Contents:
            return Contents(
                present=[
                    assigned.get(name, tensor) for name, tensor in zip(was, contents.present, strict=True)
                ],
                values=[values.get(i, value) for i, value in enumerate(contents.values)],
                versions=[
                    written[i]._version if i in written else version  # noqa: SLF001
                    for i, version in enumerate(contents.versions)
                ],
                assigned=contents.assigned,
            )

        self._opening = self._held = with_it(self._opening)
        return [with_it(each) for each in after]

    def _changed_by_both(self, tensor: Tensor) -> str:
        place = next(place for place in self._openings.places if place.opening is tensor)
        return (
            f"the loop's body changed buffer {self._state.name_of_place(place.holder, place.name)} between a sum and the gradients of the step, and the forward of that "
            "sum changes it, too: which of both counts is not known. Change it after step.mean_loss or step.backward, or before the step's first computation"
        )

    def contributions(self, after: Mapping[int, Contents]) -> dict[int, Tensor]:
        """float64 [length] for each shard: what it adds to the end-of-step all-reduce.

        after: by shard. The sums (buffer_sums.py) of those that are not still, then 1 for each
        still one that this shard changed, then 1 for each that was changed without being counted.
        """
        moving = {shard: self._moving_of(contents) for shard, contents in after.items()}
        found = self._sums.contributions(moving, [self._opening.values[i] for i in self._moving])
        for index, (shard, contents) in enumerate(after.items()):
            is_resized = any(contents.values[i].shape != self._opening.values[i].shape for i in self._still)
            if is_resized or len(found[shard]) != self._sums.length:
                self.check_sizes(contents.values)
            if self._still:
                flags = [self._value(contents, i) is not self._opening.values[i] for i in self._still]
                changed = torch.tensor(flags, dtype=torch.float64, device=self._device)
                uncounted = self._uncounted() if index == 0 else torch.zeros_like(changed)
                found[shard] = torch.cat([found[shard], changed, uncounted])
        return found

    def _uncounted(self) -> Tensor:
        """float64 [still buffers]: 1 where one differs from the opening and should not."""
        found = []
        for i in self._still:
            tensor, opening = self._openings.tensors[i], self._opening.values[i]
            if self._held.values[i] is not opening or self._has_changed(i):
                found.append(torch.zeros((), dtype=torch.float64, device=self._device))
            else:
                found.append(differ(tensor, opening).double().to(self._device))
        return torch.stack(found)

    def signs(self, total: Tensor) -> Tensor:
        """float64 [n]: what the host must know of the sum of all shards' contributions."""
        return total[self._sums.num_values :]

    def found_changes(self, signs: list[float]) -> bool:
        """Whether a shard of any rank changed a still buffer. Then it is none any more.

        signs: read from `signs`. If so, the same is to be summed once more, with other
        contributions. Raises UsageError, on every rank, where a change was not counted.
        """
        if not self._still:
            return False
        of_still = signs[-2 * len(self._still) :]
        changed, uncounted = of_still[: len(self._still)], of_still[len(self._still) :]
        if wrong := [i for i, count in zip(self._still, uncounted, strict=True) if count]:
            raise UsageError(
                f"the content of buffer {self._state.name_of(self._openings.tensors[wrong[0]])} changed while the shards of a step were computed, and torch counted no "
                "change, so that another shard may have seen it. Change it under torch.no_grad() by copy_, add_ or an index, not through .data or NumPy; or in the loop's "
                "body, after the gradients"
            )
        found = [self._openings.tensors[i] for i, count in zip(self._still, changed, strict=True) if count]
        self._moved |= {id(tensor): tensor for tensor in found}
        if found:
            self._divide()
        return bool(found)

    def check_sizes(self, values: list[Tensor] | None = None) -> None:
        """Raises UsageError where a forward gave buffers other sizes. values: theirs, else now."""
        pairs = zip(
            self._openings.tensors, values or self._openings.tensors, self._opening.values, strict=True
        )
        if resized := [tensor for tensor, value, opening in pairs if value.shape != opening.shape]:
            raise UsageError(
                f"forward gave buffer {self._state.name_of(resized[0])} another size than it had in the State: give it its final shape in __init__, "
                "or run one forward on a fixed batch before elastic.State, with torch.no_grad()"
            )

    def end(self, total: Tensor, signs: list[float]) -> None:
        """Set every buffer from the sum of all shards' contributions, float64 [length].

        signs: read from its `signs`.
        """
        self.load()
        self._sums.use(total, signs)
        self._openings.is_new = False

    def averaged(self, contents: Contents) -> list[str]:
        """The names of buffers, after `end`, whose shards had other values than their mean.

        contents: after one of this rank's shards. Normalisations of torch do not count.
        """
        index = {
            id(self._openings.tensors[i]): i for i in self._moving if _is_float(self._openings.tensors[i])
        }
        names = []
        for place in self._openings.places:
            i = index.get(id(place.opening))
            if i is not None and not place.is_average:
                value = self._value(contents, i)
                if not torch.equal(value, self._openings.tensors[i]) and not value.isnan().any():
                    names.append(self._state.name_of_place(place.holder, place.name))
        return names

    def have_same_integers(self, signs: list[float]) -> bool:
        """Whether the integers of all shards are the same. signs: as for `end`."""
        return self._sums.have_same_integers(signs)

    def hashes(self, contents: Contents) -> Tensor:
        """float64 [integer buffers, 4]: see BufferSums."""
        return self._sums.hashes(self._moving_of(contents))

    @property
    def like_hashes(self) -> Tensor:
        """A tensor of the form of `hashes`."""
        return self._sums.like_hashes

    def different_integers(self, total: Tensor) -> list[str]:
        """The names of the buffers whose integers differ, from the sum of all shards' `hashes`."""
        return [self._state.name_of(tensor) for tensor in self._sums.different_integers(total)]

    def _value(self, contents: Contents, i: int) -> Tensor:
        return contents.assigned.get(id(self._openings.tensors[i]), contents.values[i])

    def _moving_of(self, contents: Contents) -> list[Tensor]:
        return [self._value(contents, i) for i in self._moving]


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
