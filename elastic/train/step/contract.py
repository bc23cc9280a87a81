"""A step does what the recipe means, or ends the run with a sentence that names what is wrong.

A computation is what gives gradients: one `mean_loss`, or the sums of a step with their `backward`.
Everything here happens in every step, and must be cheap: benchmarks/steady.py shows its share.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from operator import attrgetter, not_
from typing import Any
from weakref import WeakMethod

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elastic.errors import UsageError
from elastic.reduce.gradient_flags import GradientFlags, left_changed
from elastic.train.state import structure
from elastic.train.state.state import State
from elastic.train.state.structure import StateParts
from elastic.train.state.unsaved import Scaler, Unsaved
from elastic.train.step import cached_weights
from elastic.train.step.forward_changes import ForwardChanges
from elastic.train.step.loose_gradients import LooseGradients
from elastic.train.step.unused_gradients import UnusedGradients

ALL_CALLS = 2  # steps of a process
_VERSION = attrgetter("_version")  # autograd's count of changes in place


class Contract:
    """What is followed and checked in the steps of one generation.

    Call `begin_step` and `end_step` in each step; in each computation `begin_computation`,
    `forward` around the shards, `function` around each call of the recipe's function, and
    `end_computation`.
    """

    def __init__(self, state: State, *, global_batch: int, shards: int) -> None:
        self._state = state
        self._global_batch = global_batch
        self._shards = shards
        self._unused = UnusedGradients()
        sizes = f"elastic.start(global_batch={2 * global_batch}, shards={2 * shards}) for k = 2"
        self._loose = LooseGradients(state.name_of, sizes)
        self._unsaved = Unsaved(state)
        self._unsaved.check_parameters(state.trained)
        self._unsaved.check_schedules()
        self._hooks = (
            register_optimizer_step_pre_hook(_call_weakly(self._before)),
            register_optimizer_step_post_hook(_call_weakly(self._updated)),
        )
        self._before_update: Callable[[], None] = lambda: None
        self._first_step: int | None = None  # of this generation
        self._has_noted = False
        self._is_computing = False
        # In the computation that was begun last; the second without those that are frozen.
        self._trained: list[nn.Parameter] = []
        self._required: list[nn.Parameter] = []
        self._held: list[nn.Parameter] = state.held  # of the trained ones, by optimizers of torch
        self._loose_ones: list[nn.Parameter] = []  # that require a gradient, and that none of them holds
        self._parts: StateParts | None = None  # of the state, where it was begun
        self._mark: list[int] = []  # of the state where the step began
        self._others: list[nn.Parameter] = []  # that no optimizer updates, and that require one
        self._flags = GradientFlags([])  # of all parameters, where the computation or pass began
        self._calls = 0  # of the function, in the pass that was begun last
        self._is_in_function = False
        self._forward: ForwardChanges | None = None  # around the last shards

    def trained(self) -> list[nn.Parameter]:
        """All that an optimizer of the state updates; within a computation the same."""
        return self._trained if self._is_computing else self._state.trained

    def required(self) -> list[nn.Parameter]:
        """Those of them that require a gradient."""
        return self._required if self._is_computing else [p for p in self.trained() if p.requires_grad]

    def others(self) -> list[nn.Parameter]:
        """Parameters that no optimizer updates and that require a gradient, in the computation."""
        return self._others

    def parts(self) -> StateParts:
        """What the state consists of; within a computation the same."""
        return self._parts if self._is_computing and self._parts else self._state.parts()

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._state.name_of(parameter)

    def name_of_module(self, module: nn.Module) -> str:
        return next((name for name, each in self._state.named_modules() if each is module), "a module")

    def begin_step(self, number: int, before_update: Callable[[], None]) -> None:
        """before_update: called before each update by an optimizer of the state."""
        self._mark = self.mark()
        self._before_update = before_update
        cached_weights.drop()
        self._unused.step = number
        if self._first_step is None:
            self._first_step = number
            self._loose.begin_loop(self._state.parameters())
        self._loose.step = number

    def end_step(self) -> str:
        """After the step's body: no gradient that an update has used is left for the next one.

        Returns what to tell the user, once.
        """
        self._loose.end_step()
        self._unused.drop_used(self._held)
        note, self._loose.note = self._loose.note, ""
        if self._has_noted:
            note = ""
        self._has_noted = self._has_noted or bool(note)
        return note

    def check_kept(self) -> None:
        """Before a state is kept. Raises UsageError for trained parameters that it lacks."""
        trained, _ = self._state.trained_and_idle()
        if trained is not self._trained:
            self._unsaved.check_parameters(trained)

    def has_waiting_gradients(self) -> bool:
        """Whether the step has computed gradients, and the body made no update with them yet."""
        return self._unused.has_waiting() or self._loose.has_waiting()

    def has_same_mark(self) -> bool:
        """Whether the step's body has left the trained parameters as they were."""
        return self._mark == self.mark()

    def mark(self) -> list[int]:
        """How often each trained parameter was written to, as far as autograd counts."""
        return list(map(_VERSION, self._trained))

    def begin_computation(self, scaler: Scaler | None) -> None:
        """Raises UsageError where gradients would be thrown away that no update has used.

        Also for parameters and a scaler that are not saved.
        """
        self._unsaved.check_scaler(scaler)
        before = self._trained
        self._parts = self._state.parts()
        self._trained, idle = self._state.trained_and_idle(self._parts)
        self._flags = GradientFlags([*self._trained, *idle])
        require = self._flags.flags[: len(self._trained)]
        frozen = [] if all(require) else list(compress(self._trained, map(not_, require)))
        self._required = list(compress(self._trained, require)) if frozen else self._trained
        self._others = list(compress(idle, self._flags.flags[len(require) :]))
        self._is_computing = True
        if self._trained is not before:  # or the modules have other parameters
            self._unsaved.check_parameters(self._trained)
        self._held = self._state.held
        self._loose_ones = self._others
        if len(self._held) < len(self._trained):
            held = set(map(id, self._held))
            self._loose_ones = [*(p for p in self._required if id(p) not in held), *self._others]
            frozen = [p for p in frozen if id(p) in held]
        parameter = self._unused.replace(self._held, frozen)
        if parameter is not None:
            batch, shards = self._global_batch, self._shards
            raise UsageError(
                f"step {self._unused.step}: {self.name_of(parameter)} has a gradient that no optimizer has used yet, and this computation would "
                f"replace it. A step already accumulates: for k batches of {batch} in one update start with k times the batch, as "
                f"elastic.start(global_batch={2 * batch}, shards={2 * shards}) for k = 2; return the sum of two losses from one function; "
                "and to drop gradients on purpose, call optimizer.zero_grad()"
            )
        self._loose.begin(self._loose_ones, are_alone=not self._held)

    def modules(self) -> list[nn.Module]:
        """Of the state, at its last computation; now, if there was none. Do not change the list."""
        return self._parts.modules if self._parts is not None else self._state.submodules()

    def end_computation(self, gradient_norms: Sequence[float], *, is_right_after: bool = False) -> None:
        """All parameters have the gradients of all shards in `.grad`.

        is_right_after: whether no code of the loop's body ran since the end of `forward`.
        """
        self._is_computing = False
        is_whole = len(self._required) == len(self._trained)
        required = self._held if is_whole else [p for p in self._held if p.requires_grad]
        self._loose.end(self._loose_ones)
        forward, marks = self._forward, None
        if is_right_after and forward is not None and structure.same(required, forward.parameters):
            marks = forward.marks
        self._unused.computed(required, is_finite=all(map(math.isfinite, gradient_norms)), known=marks)

    @contextmanager
    def forward(self, parts: StateParts | None = None) -> Iterator[None]:
        """Around the shards of a pass.

        Raises UsageError for a forward that changes parameters or leaves others frozen.
        """
        is_first_step = self._unused.step == self._first_step
        parts = parts or self.parts()
        changes = self._forward = ForwardChanges(self._state, parts, compares_contents=is_first_step)
        if not self._is_computing:
            self._flags = GradientFlags([*chain(*self._state.trained_and_idle(parts))])
        self._calls = 0
        yield
        self._check_flags()
        changes.check()

    @contextmanager
    def function(self) -> Iterator[None]:
        """Around a call of the function that the recipe gave.

        Raises UsageError for a backward; and for parameters that it has frozen, or unfrozen, for
        good: in all calls of a process's first steps, later in one of each pass, and in its last.
        """
        self._is_in_function = True
        cached_weights.drop()
        try:
            yield
        finally:
            cached_weights.drop()
            self._is_in_function = False
        self._calls += 1
        # After each call it would take a sixth of what all checks of a step may take.
        step = self._unused.step
        if step - (self._first_step or step) < ALL_CALLS or self._calls == 1 + step % self._shards:
            self._check_flags()

    def _check_flags(self) -> None:
        if changed := self._flags.changed():
            is_frozen = not changed[0].requires_grad
            names = [self.name_of(p) for p in changed if p.requires_grad is not is_frozen]
            raise UsageError(f"step {self._unused.step}: {left_changed(names, is_frozen=is_frozen)}")

    def accumulated_outside(self, parameter: nn.Parameter) -> None:
        """A backward of the recipe's own, or that of a loss past its sums."""
        if self._is_in_function:
            raise UsageError(
                f"backward() was called inside the function given to step.mean_loss or step.sum, and gave {self.name_of(parameter)} a "
                "gradient of one shard, which is not summed. Return the loss: the step computes its gradients; add a penalty to the loss that "
                "is returned; for gradients as numbers use torch.autograd.grad(...)"
            )
        if not self._is_computing:
            is_held = any(parameter is each for each in self._held)
            (self._unused if is_held else self._loose).gained(parameter)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer) -> None:
        if not self._is_in_function and any(each is optimizer for each in self._state.optimizers):
            self._before_update()

    def _updated(self, optimizer: Optimizer) -> None:
        cached_weights.drop()
        self._unused.updated(optimizer)
        step = self._unused.step
        self._unsaved.check_update(optimizer, step, self._first_step or step)


def _call_weakly(method: Callable[[Optimizer], None]) -> Callable[[Optimizer, Any, Any], None]:
    """Torch's hook of all optimizers, which would keep the contract of a loop that was left."""
    weak = WeakMethod(method)

    def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if (found := weak()) is not None:
            found(optimizer)

    return hook
