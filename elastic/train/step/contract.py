"""A step trains the parameters that the recipe means, and each gradient is used once.

A computation is what gives gradients: one `mean_loss`, or the sums of a step with their `backward`.
Everything here happens in every step, and must be cheap: benchmarks/steady.py shows its share. Of
all parameters of the State,

    trained   an optimizer updates, frozen ones too
    required  are trained, and require a gradient
    summed    are required, and not sharded
    held      are trained, by an optimizer of torch: its hook says when
    loose     require a gradient, and no optimizer of torch holds them
    idle      are not trained
    others    are idle, and require a gradient

*Forward changes no parameter.* It would have another value for the next shard of the same rank, and
the result would depend on which shards a rank has. Buffers are put back for each shard; parameters
are not, so a change is refused. Autograd does not count writes by `.data`: an audit finds them.

*No gradient is thrown away before an update has used it*, unless the recipe drops it itself. A
computation replaces `.grad`; in plain PyTorch a second backward adds to it, so that a recipe which
accumulates by hand would silently lose the first. A gradient is used once an optimizer with its
parameter has made a step, or the parameter was changed in place. At the end of its step a used
gradient goes: a process that takes over at the next step has none.

*Parameters that no optimizer of torch holds* are updated by the recipe's own code, and no hook says
when. Within a step a second computation adds to their gradients, as a second backward does. At the
end of the step these go, used or not: they are no part of the state.

*Modes are the same for each shard.* A function may call `model.eval()` and leave it at that. The
shards after the first would be computed without dropout, and how many those are depends on the
number of workers. So each shard of a pass begins in the modes that the pass began with; after it
they are those that the last shard left, as after one call in plain PyTorch. It does not see a
function that leaves others after some shards than after the rest: an audit does.

*What the steps change and need later is saved with the state.* A process that resumes
builds all objects again and loads the state into them. A module, an optimizer with a state, a
schedule or a GradScaler that no object of the State saves would silently begin at its start. An
object counts as saved if the State has it, if an object of the State holds it, or if the tensors of
the state are its own. What an object keeps without tensors and without the classes of torch is not
seen.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, is_not, ne, not_
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elastic.data.loader import Batch
from elastic.errors import UsageError
from elastic.reduce.bucket import left_changed
from elastic.reduce.exchange import peers_may_die
from elastic.snapshot.sharded import is_sharded, local, whole_of
from elastic.train.state.state import State
from elastic.train.state.structure import Parts

Scaler = torch.amp.GradScaler

MOST_NAMED = 4
_VERSION = attrgetter("_version")  # autograd's count of changes in place
_REQUIRES_GRAD, _GRAD = attrgetter("requires_grad"), attrgetter("grad")
_IS_THERE = partial(is_not, None)


class Contract:
    """Follows and checks the steps of one generation.

    Call `begin_step` and `end_step` in each step; in each computation `begin_computation` and
    `end_computation`; around the shards of a pass `begin_pass` and `end_pass`; for each `call`.
    parts: what the State consisted of at the last look. Do not change its lists. before_update:
    called before each update by an optimizer of torch, in the step's body.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._seen: WeakSet[Optimizer] = WeakSet()  # optimizers that were looked at
        self._newest: Optimizer | None = None  # of them
        self._scaler: Scaler | None = None  # the last one looked at
        self._check_schedules()
        hook = register_optimizer_step_pre_hook(self._before)
        self._hooks = hook, register_optimizer_step_post_hook(self._updated)
        self.before_update: Callable[[Optimizer], None] | None = None
        self._step, self._first_step = 0, 0  # the newest one; the first of this generation
        self._is_computing = self._is_in_function = False
        self.parts = Parts([])  # what the State consisted of at the last look
        self.required: list[nn.Parameter] = []
        self.others: list[nn.Parameter] = []
        self.summed = self.required
        self.sharded: list[nn.Parameter] = []
        self._loose: list[nn.Parameter] = []
        self._parameters: list[nn.Parameter] = []  # all
        self._flags: list[bool] = []  # which of them require a gradient
        # By the id of a parameter: the gradient that a computation gave it, with the parameter's
        # version then, and that which an optimizer has used, with its own version then. A gradient
        # in none of these is the recipe's own.
        self._given: dict[int, tuple[ReferenceType[Tensor], int]] = {}
        self._used: dict[int, tuple[ReferenceType[Tensor], int]] = {}
        self._left: dict[int, Tensor] = {}  # gradients of the step before that nothing used
        self._added_to: list[tuple[nn.Parameter, Tensor]] = []  # loose ones, with their gradients
        self._versions: list[int] = []  # of the modules' parameters, where a pass began
        self._mark: list[int] = []
        self._look()

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._state.name_of(parameter)

    def begin_step(self, number: int) -> None:
        self._mark = self.mark()
        self.before_update = None
        self._step = number
        if not self._first_step:
            self._first_step = number
            self._look()
            for parameter in self._loose:  # these gradients are from before the loop
                parameter.grad = None

    def end_step(self) -> None:
        """After the step's body: no gradient that an update has used is left for the next one."""
        if self._state.sharded is not None:
            self._state.sharded.goes_on()
            self._state.sharded.reshard()
        self._left = {id(p): p.grad for p in self._unused() if p.grad is not None}
        for parameter in (*self.parts.held, *self._loose):
            if not self._left or id(parameter) not in self._left:
                parameter.grad = None
        # Another parameter may get the id of a former one.
        self._given, self._used = {name: self._given[name] for name in self._left if name in self._given}, {}

    def has_waiting_gradients(self) -> bool:
        """Whether the step has computed gradients, and the body made no update with them yet."""
        return bool(self._unused())

    def has_same_mark(self) -> bool:
        """Whether the step's body has left the trained parameters as they were."""
        return self._mark == self.mark()

    def mark(self) -> list[int]:
        """How often each trained parameter was written to, as far as autograd counts."""
        return list(map(_VERSION, self.parts.trained))

    def begin_computation(self, scaler: Scaler | None) -> None:
        """Raises UsageError where gradients would be thrown away that no update has used.

        Also for parameters and a scaler that are not saved.
        """
        if scaler is not None and scaler is not self._scaler:
            self._check_scaler(scaler)
        self._look()
        self._is_computing = True
        for parameter in self._unused():
            if parameter.requires_grad and parameter.grad is not None and _any(parameter.grad):
                raise UsageError(
                    f"step {self._step}: {self.name_of(parameter)} has a gradient that no optimizer has used yet; for k batches in one step "
                    "start with k times the global_batch and the shards; to drop gradients, call optimizer.zero_grad()"
                )
        self._left = {}
        self._added_to = [(p, p.grad) for p in self._loose if p.grad is not None]

    def end_computation(self) -> None:
        """All parameters have the gradients of all shards in `.grad`."""
        self._is_computing = False
        for parameter, before in self._added_to:
            parameter.grad = before if parameter.grad is None else before + parameter.grad
        there = [p for p in self.required if p.grad is not None]
        gradients = zip(map(ref, map(_GRAD, there)), map(_VERSION, there), strict=True)
        self._given.update(zip(map(id, there), gradients, strict=True))

    def begin_pass(self) -> None:
        """Before the shards of a pass."""
        if self._state.sharded is not None:
            self._state.sharded.goes_on()
        if not self._is_computing:
            self._look()
        self._versions = list(map(_VERSION, self.parts.owned.values()))

    def call(self, function: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """The recipe's function of one shard's batch.

        Raises UsageError where it leaves parameters frozen, or unfrozen, and for a backward in it.
        """
        self._is_in_function = True
        try:
            output = function(batch)
        finally:
            self._is_in_function = False
        if self._step == self._first_step:  # in each call it would take half of what checks cost
            self._check_flags()
        return output

    def end_pass(self) -> None:
        """After them. Raises UsageError for parameters that the function has changed."""
        if self._state.sharded is not None:
            self._state.sharded.reshard()
        if list(map(_REQUIRES_GRAD, self._parameters)) != self._flags:
            self._check_flags()
        owned = self.parts.owned
        if not self.parts.has_same_values():
            self._refuse([p for name, p in self._state.parts().owned.items() if name not in owned])
        versions = list(map(_VERSION, owned.values()))
        if versions != self._versions:
            pairs = zip(owned.values(), versions, self._versions, strict=True)
            self._refuse([p for p, after, before in pairs if after != before])

    def check_body(self) -> None:
        """Between a sum and its gradients. Raises UsageError where the body has changed parameters,
        as far as autograd counts.
        """
        pairs, required = (
            zip(self.parts.owned.values(), self._versions, strict=True),
            set(map(id, self.required)),
        )
        if changed := [p for p, before in pairs if id(p) in required and _VERSION(p) != before]:
            raise UsageError(
                f"the loop's body changed {self.name_of(changed[0])} between a sum and the gradients, which are those of what it was; change it after the "
                "gradients, or before the first sum"
            )

    def check_backward(self, parameter: nn.Parameter) -> None:
        """A backward gave the parameter a gradient. Raises UsageError inside a step's function."""
        if self._is_in_function:
            raise UsageError(
                f"backward() was called inside the function given to the step, and gave {self.name_of(parameter)} a gradient of one shard alone. "
                "Return the loss, with any penalty added; for gradients as numbers use torch.autograd.grad(...)"
            )

    def close(self) -> None:
        if self._state.sharded is not None:
            self._state.sharded.goes_on()
        for hook in self._hooks:
            hook.remove()

    def _look(self) -> None:
        """Which parameters there are, and which of them require a gradient.

        The lists are those of the last look where nothing has changed. Raises UsageError for
        trained parameters that no object of the State saves.
        """
        if self._state.sharded is not None:
            self._state.sharded.reshard()
        before, self.parts = self.parts, self._state.parts()
        if before is not self.parts:
            self._check_parameters()
            self._parameters = [*self.parts.trained, *self.parts.idle]
        flags = list(map(_REQUIRES_GRAD, self._parameters))
        if before is not self.parts or flags != self._flags:
            self._flags, trained = flags, self.parts.trained
            self.required = list(compress(trained, flags))
            self.others = whole_of(list(compress(self.parts.idle, flags[len(trained) :])))
            self.summed = whole_of(self.required)
            self.sharded = [p for p in self.required if is_sharded(p)]
            held = set(map(id, self.parts.held))
            self._loose = [*(p for p in self.required if id(p) not in held), *self.others]

    def _check_flags(self) -> None:
        """A function that freezes or unfreezes for good would change what is summed for the next
        shard of the same worker alone. It may do so for itself, and put it back.
        """
        now = list(map(_REQUIRES_GRAD, self._parameters))
        if now != self._flags:
            changed = [*compress(self._parameters, map(ne, now, self._flags))]
            is_frozen = not changed[0].requires_grad
            names = [self.name_of(p) for p in changed if p.requires_grad is not is_frozen]
            raise UsageError(f"step {self._step}: {left_changed(names, is_frozen=is_frozen)}")

    def _unused(self) -> list[nn.Parameter]:
        """Of those that optimizers of torch hold, with a gradient that no update has used.

        An empty list where one of these is not finite: a GradScaler skips the update of all.
        """
        held, used, given, nothing = self.parts.held, self._used, self._given, (lambda: None, 0)
        gradients = list(map(_GRAD, held))
        if not any(map(_IS_THERE, gradients)):
            return []
        uses = list(map(used.get, map(id, held), repeat(nothing)))
        is_used = [
            g is None or (by() is g and version == _VERSION(g))
            for g, (by, version) in zip(gradients, uses, strict=True)
        ]
        if all(is_used):  # in the ordinary step
            return []
        unused: list[nn.Parameter] = []
        for p, g in compress(zip(held, gradients, strict=True), map(not_, is_used)):
            by, version = given.get(id(p), nothing)
            is_changed = by() is g and version != p._version  # noqa: SLF001 - by the recipe itself
            if not is_changed:
                unused.append(p)
        are_finite = all(not _any(~p.grad.isfinite()) for p in unused if p.grad is not None)
        return unused if are_finite else []

    def _refuse(self, changed: list[nn.Parameter]) -> None:
        names = ", ".join(dict.fromkeys(map(self.name_of, changed[:MOST_NAMED]))) or "of a module"
        raise UsageError(
            f"forward changed the parameter {names}, so the next shard has other weights; change it in the loop's body, after "
            "optimizer.step() (a momentum encoder, a max_norm), or before the loop, on fixed samples"
        )

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        """Torch calls it for all optimizers."""
        if self.before_update is not None and not self._is_in_function:
            self.before_update(optimizer)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether it is one of the state's."""
        return any(each is optimizer for each in self._state.optimizers)

    def _updated(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            with_gradients = group["params"]
            gradients = list(map(_GRAD, with_gradients))
            if not all(map(_IS_THERE, gradients)):
                with_gradients = list(compress(with_gradients, map(_IS_THERE, gradients)))
                gradients = list(map(_GRAD, with_gradients))
            uses = zip(map(ref, gradients), map(_VERSION, gradients), strict=True)
            self._used.update(zip(map(id, with_gradients), uses, strict=True))
            if self._left and any(self._left.get(id(p)) is p.grad for p in with_gradients):
                raise UsageError(
                    f"step {self._step}: {type(optimizer).__name__} made an update with gradients of the step before; gradients are no part "
                    "of the state, so that a resume between the two steps would lose them: call the optimizer in the step that computed them"
                )
        self._check_update(optimizer)

    # What no object of the State saves.

    def _check_parameters(self) -> None:
        """Raises UsageError for a parameter that an optimizer updates and that is not saved."""
        not_owned = [p for p in self.parts.trained if id(p) not in self.parts.owned]
        saved = self._saved() if not_owned else set()
        for parameter in not_owned:
            if _storage(parameter) not in saved:
                raise UsageError(
                    f"expected the State to hold what an optimizer updates, found a tensor of shape {list(parameter.shape)} outside; give its "
                    "module, loose ones in a ParameterList; make optimizers after fully_shard and loads with assign=True"
                )

    def _check_schedules(self) -> None:
        """Raises UsageError for an optimizer whose learning rate schedule is not saved."""
        scheduled = {id(thing.optimizer) for thing in self._state.held() if isinstance(thing, LRScheduler)}
        for optimizer in self._state.optimizers:
            if hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in scheduled:
                raise _missing(f"learning rate schedule of its {type(optimizer).__name__}", "scheduler")

    def _check_scaler(self, scaler: Scaler) -> None:
        """Raises UsageError for a scaler that is in use and not saved."""
        if not scaler.is_enabled():
            return
        if not any(thing is scaler for thing in self._state.held()):
            raise _missing("GradScaler that scales this loss", "scaler")
        self._scaler = scaler

    def _check_update(self, optimizer: Optimizer) -> None:
        """An optimizer has made an update.

        Raises UsageError if it updates parameters of the state, with a state of its own that is not
        saved. A step may build one without a state, for its own updates.
        """
        if optimizer is self._newest or optimizer in self._seen:
            return
        self._newest = optimizer  # a WeakSet is asked by calls of Python
        self._seen.add(optimizer)
        if self.holds(optimizer):
            self._check_schedules()  # a schedule that was built after the loop began
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


_TRAINING = attrgetter("training")


class Modes:
    """Whether each of some modules was in training mode when this was made."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._flags = modules, list(map(_TRAINING, modules))

    def load(self) -> None:
        """Gives those that were there. Set by attribute: recipes override `train`."""
        if list(map(_TRAINING, self._modules)) != self._flags:
            for module, is_training in zip(self._modules, self._flags, strict=True):
                module.training = is_training


def _missing(what: str, name: str) -> UsageError:
    return UsageError(
        f"expected the State to hold the {what}, found none there; a resume would begin with a new one: "
        f"State(..., {name}={name})"
    )


def _any(tensor: Tensor) -> bool:
    with peers_may_die("a look at gradients"):  # of a sharded tensor all ranks have a part
        return bool(tensor.any())


def _storage(tensor: Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()
