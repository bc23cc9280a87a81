"""What the steps change and need later is saved with the state, or the recipe is refused.

A process that resumes builds all objects again and loads the state into them. A module, an
optimizer with a state, a schedule or a GradScaler that no object of the State saves would silently
begin at its start.

An object counts as saved if the State has it, if an object of the State holds it, or if the tensors
of the state are its own. It does not see what an object keeps without tensors and without the
classes of torch.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastic.errors import UsageError
from elastic.train.state import structure
from elastic.train.state.state import State

Scaler = torch.amp.GradScaler


class Unsaved:
    """Looks for what no object of a state saves."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._optimizers: WeakSet[Optimizer] = WeakSet()  # that were looked at
        self._scaler: Scaler | None = None  # the last one looked at

    def check_parameters(self, trained: Sequence[nn.Parameter]) -> None:
        """Raises UsageError for a parameter that an optimizer updates and that is not saved."""
        owned = self._state.parts().owned
        others = [p for p in trained if id(p) not in owned]
        saved = self._saved() if others else set()
        for parameter in others:
            if _storage(parameter) not in saved:
                raise UsageError(
                    f"expected the State to hold every parameter that an optimizer updates, found one of shape {list(parameter.shape)} outside; "
                    "give its module to the State, loose tensors in an nn.ParameterList; load weights without assign=True"
                )

    def check_schedules(self) -> None:
        """Raises UsageError for an optimizer whose learning rate schedule is not saved."""
        scheduled = {id(thing.optimizer) for thing in self._things() if isinstance(thing, LRScheduler)}
        for optimizer in self._state.optimizers:
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in scheduled:
                raise _missing(f"learning rate schedule of its {type(optimizer).__name__}", "scheduler")

    def check_scaler(self, scaler: Scaler | None) -> None:
        """Raises UsageError for a scaler that is in use and not saved."""
        if scaler is None or scaler is self._scaler or not scaler.is_enabled():
            return
        if not any(thing is scaler for thing in self._things()):
            raise _missing("GradScaler that scales this loss", "scaler")
        self._scaler = scaler

    def check_update(self, optimizer: Optimizer) -> None:
        """An optimizer has made an update.

        Raises UsageError if it updates parameters of the state, with a state of its own that is not
        saved. A step may build one without a state, for its own updates.
        """
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        if any(each is optimizer for each in self._state.optimizers):
            self.check_schedules()  # a schedule that was built after the loop began
            return
        owned = self._state.parts().owned
        if not any(id(p) in owned for group in optimizer.param_groups for p in group["params"]):
            return
        kept = [v for of_one in optimizer.state.values() for v in of_one.values() if v is not None]
        saved = self._saved() if kept else set()
        if not all(isinstance(value, Tensor) and _storage(value) in saved for value in kept):
            raise UsageError(
                f"expected the State to hold each optimizer of its parameters, found {type(optimizer).__name__} outside; give all "
                "to the State before the loop, also wrapped ones, and change groups in place; inner steps train a model's copy"
            )

    def _saved(self) -> set[int]:
        return {_storage(tensor) for tensor in self._state.flatten().tensors.values()}

    def _things(self) -> list[Any]:
        return [part for thing in self._state.objects.values() for part in structure.held(thing)]


def _missing(what: str, name: str) -> UsageError:
    return UsageError(
        f"expected the State to hold the {what}, found none there; a resume would begin with a new one: "
        f"State(..., {name}={name})"
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
