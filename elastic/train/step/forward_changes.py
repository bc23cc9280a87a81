"""Forward changes no parameter: every shard of a batch starts from the same weights.

A parameter that a forward changes would have another value for the next shard of the same rank, and
the result would depend on which shards a rank has. Buffers are put back for each shard
(buffers.py); parameters are not, so a change is refused.

Changes in place, and parameters that are replaced, are found in every computation. Writes through
`.data`, which autograd does not count, are found in the first step of each generation alone, by
comparing contents: that costs two passes over the parameters. So are modules, parameters and
buffers that a forward adds.
"""

from itertools import chain, repeat

from torch import nn

from elastic.errors import UsageError
from elastic.train.state import structure
from elastic.train.state.flat import FlatState, checksum_of
from elastic.train.state.state import State
from elastic.train.state.structure import StateParts
from elastic.train.step.parameter_marks import marks_of

MOST_NAMED = 3  # beside the first


class ForwardChanges:
    """What the parameters of a state's modules were before the shards of one computation.

    marks: of `parameters`.
    """

    def __init__(self, state: State, parts: StateParts, *, compares_contents: bool) -> None:
        """parts: of the state, now."""
        self._state = state
        self._modules, self._holders, self._places = parts.modules, parts.holders, parts.places
        self.parameters = list(parts.owned.values())
        self.marks = marks_of(self.parameters)
        self._contents = self._find_contents() if compares_contents else None
        self._number = self._number_of_parts() if compares_contents else 0

    def check(self) -> None:
        """After the shards. Raises UsageError with the names of what forward changed."""
        if not structure.same(structure.values_of(self._holders), self._places.values):
            self._check_places()
        marks = marks_of(self.parameters)
        if marks != self.marks:
            of_each = zip(
                self.parameters, zip(*marks, strict=True), zip(*self.marks, strict=True), strict=True
            )
            self._refuse([self._state.name_of(p) for p, now, before in of_each if now != before])
        if self._contents is not None:
            contents = self._find_contents()
            if changed := [i for i in self._contents if contents[i] != self._contents[i]]:
                self._refuse([self._state.name_of(self.parameters[int(i)]) for i in changed])
            if self._number_of_parts() != self._number:
                raise UsageError(
                    "forward added or removed a module, a parameter or a buffer; a process that resumes builds the objects from the start and would not have it: "
                    "make all of them in __init__ (a buffer that is a cache may be registered with persistent=False)"
                )

    def _check_places(self) -> None:
        """No parameter was replaced or removed; in later steps, forward may add one."""
        sizes, names, parameters = self._places
        holders = chain.from_iterable(map(repeat, self._holders, sizes))
        replaced = [
            self._state.name_of_place(holder, name)
            for holder, name, parameter in zip(holders, names, parameters, strict=True)
            if parameter is not None and holder.get(name) is not parameter
        ]
        if replaced:
            self._refuse(replaced)

    def _refuse(self, names: list[str]) -> None:
        first, *others = dict.fromkeys(names)  # one may stand in several places
        raise UsageError(
            f"forward changed the parameter {first}{_beside(others)}, so that the next shard of the batch begins with other weights, and the result depends on "
            "which worker computes which shard. Initialise from data before the loop, on fixed samples; update a momentum encoder in the loop's "
            "body, after optimizer.step(); in place of nn.Embedding(max_norm=...) renormalise the weights after optimizer.step()"
        )

    def _find_contents(self) -> dict[str, str]:
        tensors = {str(index): parameter for index, parameter in enumerate(self.parameters)}
        return checksum_of(FlatState(tensors=dict(tensors), document={})).entries

    def _number_of_parts(self) -> int:
        return sum(map(_number_of_parts, self._modules))


def _beside(others: list[str]) -> str:
    more = len(others) - MOST_NAMED
    return (
        f" (and {', '.join(others[:MOST_NAMED])}{f' and {more} more' if more > 0 else ''})" if others else ""
    )


def _number_of_parts(module: nn.Module) -> int:
    saved = len(module._buffers) - len(module._non_persistent_buffers_set)  # noqa: SLF001
    return len(module._modules) + len(module._parameters) + saved  # noqa: SLF001
