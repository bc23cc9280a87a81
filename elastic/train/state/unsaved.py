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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR

from elastic.errors import UsageError
from elastic.train.state import structure
from elastic.train.state.state import State

Scaler = torch.amp.GradScaler
_FORGOTTEN = "State(..., optimizer=optimizer), or that of the optimizer that it wraps, State(..., base=optimizer.base_optimizer)"
_BUILT_AGAIN = (
    "do not build an optimizer again in the loop. Change the groups of the first one in place, for group in optimizer.param_groups: group['lr'] = 0.01; or, "
    "for one of another kind, build both before the loop, give both to the State, State(..., first=first, second=second), and choose by step.number which "
    "one steps"
)


class Unsaved:
    """Looks for what no object of a state saves."""

    def __init__(self, state: State) -> None:
        self._state = state
        # That were looked at, with the step in which one that nothing saves made its first update.
        self._optimizers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._scaler: Scaler | None = None  # the last one that was
        self._functions = [
            (name, each, list(each.lr_lambdas))
            for name, thing in state.objects.items()
            for each in _schedules(thing)
            if isinstance(each, LambdaLR | MultiplicativeLR)
        ]

    def check_parameters(self, trained: Sequence[nn.Parameter]) -> None:
        """Raises UsageError for a parameter that an optimizer updates and that is not saved."""
        owned = self._owned()
        others = [p for p in trained if id(p) not in owned]
        if not others:
            return
        saved = self._saved()
        for parameter in others:
            if _storage(parameter) not in saved:
                raise UsageError(
                    f"expected the State to hold every parameter that an optimizer updates, found one of shape {list(parameter.shape)} in "
                    f"{self._optimizer_of(parameter)} that no object of it saves; a resume would begin it as the script builds it: give its module to the State as well, "
                    "State(..., head=head); loose tensors belong into an nn.ParameterList or nn.ParameterDict. Where the loop replaced the parameters of a module, as "
                    "load_state_dict(..., assign=True) does, the optimizer still has the old ones: load without assign"
                )

    def check_schedules(self) -> None:
        """Raises UsageError for an optimizer whose learning rate schedule is not saved."""
        scheduled = {id(thing.optimizer) for thing in self._things() if isinstance(thing, LRScheduler)}
        for optimizer in self._state.optimizers:
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in scheduled:
                raise UsageError(
                    f"expected the State to hold the learning rate schedule of its {type(optimizer).__name__}, found none; a resume would begin the "
                    "schedule from its start: State(..., scheduler=scheduler)"
                )

    def check_functions(self, step: int) -> None:
        """Raises UsageError for a schedule whose functions are others than before the loop."""
        for name, schedule, built in self._functions:
            if not structure.same(schedule.lr_lambdas, built):
                raise UsageError(
                    f"step {step}: the functions of {name} ({type(schedule).__name__}.lr_lambdas) are others than before the loop. No State saves a function, "
                    "so that a resume would go on with those that the script builds: give the schedule one function that knows all phases, as "
                    "lambda n: 0.9**n if n < 100 else 0.5**n, with one for each group that will be there, or set the learning rate from step.number"
                )

    def check_scaler(self, scaler: Scaler | None) -> None:
        """Raises UsageError for a scaler that is in use and not saved."""
        if scaler is None or scaler is self._scaler or not scaler.is_enabled():
            return
        if not any(thing is scaler for thing in self._things()):
            raise UsageError(
                "expected the State to hold the GradScaler that scales this loss, found none there; a resume would begin with its first scale: "
                "State(..., scaler=scaler)"
            )
        self._scaler = scaler

    def check_update(self, optimizer: Optimizer, step: int, first_step: int) -> None:
        """An optimizer has made an update in `step`; this process began with `first_step`.

        Raises UsageError if it updates parameters of the state, with a state of its own that is not
        saved; or without one, if it was first used later than at the loop's beginning, and is used
        again: then the loop may have built it in a step that a resume does not do.
        """
        since = self._optimizers.get(optimizer)
        if since is None:
            self._optimizers[optimizer] = 0
            self._check_first_update(optimizer, step)
        elif since not in (0, first_step, step):
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) that no object of the State saves was used first in step {since}, and now again. If the loop built "
                f"it, a resume would go on with what the script builds before the loop: {_BUILT_AGAIN}"
            )

    def _check_first_update(self, optimizer: Optimizer, step: int) -> None:
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        owned = self._owned()
        ours = next((p for p in updated if id(p) in owned), None)
        if ours is None:
            return
        if any(thing is optimizer for thing in self._state.optimizers):
            self.check_schedules()  # a schedule that was built after the loop began
            return
        kept = [v for of_one in optimizer.state.values() for v in of_one.values() if v is not None]
        saved = self._saved() if kept else set()
        if all(isinstance(value, Tensor) and _storage(value) in saved for value in kept):
            self._optimizers[optimizer] = 0 if self._is_wrapped(optimizer) else step
            return
        is_second = self._is_updated(ours) and not self._is_wrapped(optimizer)
        raise UsageError(
            f"an optimizer ({type(optimizer).__name__}) updates {self._state.name_of(ours)} and keeps a state of its own, which no object of "
            f"the State saves; a resume would begin without it: {_BUILT_AGAIN if is_second else _FORGOTTEN}. One that the loop makes in each step for inner "
            "steps (Reptile, MAML): let it train a copy of the module inside the function given to step.sum, return the change of the weights there, and set "
            ".grad from the sum"
        )

    def _is_updated(self, parameter: Tensor) -> bool:
        """Whether an optimizer of the State updates it."""
        groups = (group for each in self._state.optimizers for group in each.param_groups)
        return any(each is parameter for group in groups for each in group["params"])

    def _is_wrapped(self, optimizer: Optimizer) -> bool:
        """Whether it holds an optimizer of the State, or one of these holds it."""
        ours = self._state.optimizers
        holds = any(value is each for value in vars(optimizer).values() for each in ours)
        return holds or any(value is optimizer for each in ours for value in vars(each).values())

    def _owned(self) -> dict[int, nn.Parameter]:
        return structure.parameters(structure.submodules(self._state.modules))

    def _saved(self) -> set[int]:
        return {_storage(tensor) for tensor in self._state.flatten().tensors.values()}

    def _things(self) -> list[Any]:
        return [part for thing in self._state.objects.values() for part in structure.held(thing)]

    def _optimizer_of(self, parameter: Tensor) -> str:
        for optimizer in self._state.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for index, each in enumerate(group["params"]):
                    if each is parameter:
                        return f"{type(optimizer).__name__}.param_groups[{number}]['params'][{index}]"
        return "an object of the State"


def _schedules(thing: Any) -> list[Any]:
    """The schedule itself, and those that it chains."""
    inner = getattr(thing, "_schedulers", []) if isinstance(thing, LRScheduler) else []
    return [thing, *(each for part in inner for each in _schedules(part))]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
