"""An optimizer takes another run's tensors and counts; its hyperparameters are the recipe's own.

Those that a schedule has set go on with the schedule, if it is taken too. Everything here works on
states as state.py writes them down: `{"dict": [[key, value], ...]}`, `{"tensor": name}`.

It does not compare which parameters stand in which place, unless the optimizer was given their
names: that is for as_built.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.train.state.flat import FlatState

GROUPS = "param_groups"
_OF_PARAMETERS = {"params", "param_names"}
# How it computes, not what: a note about them would say nothing.
_UNNOTED = {*_OF_PARAMETERS, "initial_lr", "foreach", "fused", "capturable"}
# What schedulers add to the groups.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
# The state of torch's optimizers that has one number for each of the parameter's.
_LIKE_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg"}
_LIKE_PARAMETER |= {"grad_avg", "acc_delta", "sum", "prev", "step_size", "ax"}


def set_by(scheduler: LRScheduler) -> set[str]:
    """The hyperparameters that a scheduler sets at each of its steps."""
    return {"lr", "momentum", "betas"} if getattr(scheduler, "cycle_momentum", False) else {"lr"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedOptimizer:
    """The entry `name` as it is to be loaded, or what does not fit; notes: for the console."""

    value: Any
    tensors: dict[str, Tensor]
    problems: list[str]
    notes: list[str]


def fit_optimizer(name: str, saved: FlatState, built: FlatState, scheduled: set[str]) -> FittedOptimizer:
    """saved, built: of the parent, and of the recipe. scheduled: what goes on as it was saved."""
    theirs, ours = _groups(saved.document[name]), _groups(built.document[name])
    tensors = {key: tensor for key, tensor in saved.tensors.items() if key.startswith(f"{name}.")}
    problems, notes, merged = _other_groups(name, theirs, ours), list[str](), []
    if problems:
        return FittedOptimizer(value=None, tensors={}, problems=problems, notes=[])
    for number, (there, here) in enumerate(zip(theirs, ours, strict=True)):
        goes_on = scheduled & there.keys() & here.keys()
        merged.append(here | {key: there[key] for key in goes_on})
        notes += _notes(f"{name}.{GROUPS}[{number}]", there, here, goes_on)
        # A learning rate may be a tensor.
        of_recipe = _tensors_in([here[key] for key in here.keys() - goes_on])
        tensors |= {each: built.tensors[each] for each in of_recipe}
    value = _with_groups(saved.document[name], merged)
    named = set(_tensors_in(value))
    tensors = {key: tensor for key, tensor in tensors.items() if key in named}
    return FittedOptimizer(value=value, tensors=tensors, problems=[], notes=notes)


def other_shapes(name: str, optimizer: Optimizer) -> list[str]:
    """State that cannot be that of its parameter, once it is loaded."""
    return [
        f"{name}: {key} has shape {list(value.shape)} there, its parameter has {list(parameter.shape)} here"
        for parameter, of_parameter in optimizer.state.items()
        for key, value in of_parameter.items()
        if key in _LIKE_PARAMETER and isinstance(value, Tensor) and value.shape != parameter.shape
    ]


def _groups(value: Any) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer's state, each with its values as they are written."""
    return [dict(_content(group)) for group in _content(dict(_content(value)).get(GROUPS, {"list": []}))]


def _with_groups(value: Any, groups: list[dict[str, Any]]) -> Any:
    """The state of an optimizer with other parameter groups."""
    written = {"list": [{"dict": [[*field] for field in group.items()]} for group in groups]}
    return {
        kind: [[key, written if key == GROUPS else content] for key, content in fields]
        for kind, fields in value.items()
    }


def _other_groups(name: str, theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    if len(theirs) != len(ours):
        return [f"{name} has {len(theirs)} parameter groups there and {len(ours)} here"]
    words = []
    for number, (there, here) in enumerate(zip(theirs, ours, strict=True)):
        group = f"{name}.{GROUPS}[{number}]"
        sizes = [len(_content(each["params"])) for each in (there, here)]
        names = [each["param_names"] for each in (there, here) if "param_names" in each]
        if sizes[0] != sizes[1]:
            words.append(f"{group} has {sizes[0]} parameters there and {sizes[1]} here")
        elif len(names) > 1 and names[0] != names[1]:
            words.append(f"{group} has parameters of other names or in another order here")
        # Another version of torch has more hyperparameters, and another optimizer has others.
        only_there, only_here = (
            sorted(one.keys() - other.keys() - _OF_SCHEDULERS - _OF_PARAMETERS)
            for one, other in ((there, here), (here, there))
        )
        if only_there and only_here:
            hyperparameters = f"{', '.join(only_there)} there and {', '.join(only_here)} here"
            words.append(f"{group} is that of another optimizer, with {hyperparameters}")
    return words


def _notes(group: str, there: dict[str, Any], here: dict[str, Any], goes_on: set[str]) -> list[str]:
    notes = [f"{group}: {key} {_text(there[key])}, where its schedule goes on" for key in sorted(goes_on)]
    notes += [
        f"{group}: {key} {_text(here[key])}, as the recipe builds it ({_text(there[key])} there)"
        for key in sorted((there.keys() & here.keys()) - goes_on - _UNNOTED)
        if there[key] != here[key]
    ]
    return notes


def _content(value: Any) -> Any:
    """[[key, value], ...] of a dict as it is written down, the items of a list."""
    (content,) = value.values()
    return content


def _tensors_in(value: Any) -> Iterator[str]:
    """The names of the tensors in a value that is written down."""
    if isinstance(value, dict):
        for kind, content in value.items():
            if kind == "tensor":
                yield content
            else:
                yield from _tensors_in(content)
    elif isinstance(value, list):
        for item in value:
            yield from _tensors_in(item)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        return "a tensor" if kind == "tensor" else str(content)
    return str(value)
