"""What the loop puts into the variables that run.data was given has no effect, and is refused.

`dataset = reload()` or `weights[i] = loss` looks as if the next step had other samples. The run
goes on with the dataset that it was given, and has read the weights once. A variable counts that
named such an object where the loop began, in a frame of the loop or among its global ones; and a
new value counts that could be meant in its place, as a dataset in that of a dataset.

It does not see an attribute that held the object.
"""

from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

from torch.utils.data import Dataset

from elastic.data.stale_copies import Attribute, version_of
from elastic.errors import UsageError
from elastic.train.dataset_contents import DatasetContents
from elastic.train.stable_names import own_frames, variables_of

_ADVICE = {
    "dataset": "Let dataset[i] give other samples, by what the loop keeps in elastic.Values or sets from step.number; or choose samples by "
    "run.data(order=function(epoch)). Another data set, to evaluate, needs another name",
    "weights": "Weights are read once. Keep what the loop chooses in elastic.Values, and let the dataset read it there; or draw by "
    "run.data(order=function(epoch)), from the epoch alone",
    "order": "Give run.data one function that knows all epochs",
    "collate": "Give run.data one function, which reads what the loop keeps in elastic.Values",
}


class GivenData:
    """given: the arguments of run.data, by name, as the recipe wrote them."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = {name: thing for name, thing in given.items() if thing is not None}
        self._names: dict[tuple[CodeType, str], str] | None = None
        self._weights = DatasetContents()

    def look(self, step: int, frame: FrameType | None) -> None:
        """frame: of the loop, or below it. Raises UsageError for a change since the first look."""
        is_first, names = self._names is None, self._names or {}
        for each in own_frames(frame):
            for name, value in variables_of(each).items():
                if is_first and (argument := self._argument(value)):
                    names[each.f_code, name] = argument
                elif not is_first and (argument := names.get((each.f_code, name), "")):
                    self._check(step, name, argument, value)
        self._names = names
        weights = self._given.get("weights")
        if self._weights.read({"weights": Attribute(weights, version_of(weights))}):
            raise UsageError(
                f"step {step}: the loop has changed the weights that run.data was given, which has no effect. {_ADVICE['weights']}"
            )

    def _argument(self, value: Any) -> str:
        return next((name for name, thing in self._given.items() if value is thing), "")

    def _check(self, step: int, name: str, argument: str, value: Any) -> None:
        if value is not self._given[argument] and _is_meant(argument, value, self._given[argument]):
            raise UsageError(
                f"step {step}: {name} is another object than the one that run.data was given as its {argument}, which has no effect: the run goes on "
                f"with the former one. {_ADVICE[argument]}"
            )


def _is_meant(argument: str, value: Any, former: Any) -> bool:
    """Whether run.data would have taken it as well."""
    if argument == "dataset":
        return isinstance(value, Dataset) or type(value) is type(former)
    if argument == "weights":
        return hasattr(value, "__len__") and not isinstance(value, str) and len(value) == len(former)
    return callable(value)
