"""What to write in the place of a value that only pickle could keep.

The advice is a pair of expressions for state_dict and load_state_dict, where the kind is known. It
does not promise that they keep all that an instance of a subclass has.
"""

import random
from collections import defaultdict, deque
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from elastic.errors import UsageError

# (kind, what state_dict gives, what load_state_dict makes of it); the first that fits.
_INSTEAD: tuple[tuple[Any, str, str], ...] = (
    (torch.Size, "tuple(x)", "torch.Size(saved)"),
    (Enum, "x.name", "Kind[saved]"),
    (np.ndarray, "torch.from_numpy(x)", "saved.numpy()"),
    (np.generic, "x.item()", "saved"),
    (set | frozenset, "sorted(x)", "set(saved)"),
    (deque, "list(x)", "deque(saved, maxlen=...)"),
    (defaultdict, "dict(x)", "x.update(saved)"),
    (torch.Generator, "x.get_state()", "x.set_state(saved)"),
    (np.random.Generator, "x.bit_generator.state", "x.bit_generator.state = saved"),
    (random.Random, "x.getstate()", "x.setstate(saved)"),
    (bytes | bytearray, "list(x)", "bytes(saved)"),
    (complex, "[x.real, x.imag]", "complex(*saved)"),
    (PurePath, "str(x)", "Path(saved)"),
    (torch.dtype, "str(x)", "getattr(torch, saved.removeprefix('torch.'))"),
)


def advice(value: Any) -> str:
    """What to do, as the rest of a sentence."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return (
            "it has a state of its own: give it to the State under a name, as State(scheduler=scheduler), or give x.state_dict() in "
            "state_dict and call x.load_state_dict(saved) in load_state_dict"
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (
            f"give tuple(x) in state_dict, and make {type(value).__name__}(*saved) of it in load_state_dict"
        )
    for kind, given, made in _INSTEAD:
        if isinstance(value, kind):
            as_it_is = "; elastic.Values(name=array) takes arrays as they are" * (kind is np.ndarray)
            return f"give {given} in state_dict, and in load_state_dict {made}{as_it_is}"
    if isinstance(value, int | float | str | list | tuple | dict):
        return f"give a plain {_plain_kind(value)} in state_dict, and make a {type(value).__name__} of it in load_state_dict"
    if isinstance(value, torch.Tensor):
        return "give x.detach().as_subclass(torch.Tensor) in state_dict"
    if callable(value):
        return "leave it out of state_dict: the recipe builds it again"
    return (
        "leave it out of state_dict if the recipe builds it again and no step changes it; else give the tensors, numbers and words in it, "
        "and build it from them in load_state_dict"
    )


def _plain_kind(value: Any) -> str:
    kinds = int, float, str, list, tuple, dict
    return next(kind.__name__ for kind in kinds if isinstance(value, kind))


def advice_for_entry(name: str, thing: Any) -> str:
    """The same of what was given to a State and has not both methods."""
    if isinstance(thing, dict):
        return "give what it holds by name: State(**objects), or each object under a name of its own"
    if isinstance(thing, list | tuple):
        return f"give its items under names of their own, State({name}_0=..., {name}_1=...), or modules as an nn.ModuleList"
    if isinstance(thing, torch.nn.Parameter):
        return f"keep it in a module: {name} = nn.ParameterDict({{'value': parameter}})"
    if isinstance(thing, bool | int | float | str | None):
        return f"keep it in elastic.Values({name}=...), and read and set it there"
    if isinstance(thing, type):
        return f"give an instance: State({name}={thing.__name__}(...))"
    kind = type(thing).__name__
    missing = [each for each in ("state_dict", "load_state_dict") if not hasattr(thing, each)]
    if isinstance(thing, torch.Tensor) or not type(thing).__module__.startswith(
        ("torch", "numpy", "builtins")
    ):
        owner = "a class that holds it" if isinstance(thing, torch.Tensor) else f"the class {kind}"
        return (
            f"give {owner} the missing {' and '.join(missing)}: state_dict(self) returns a dict of the tensors, lists and numbers that the "
            "steps change, as {'momenta': self.momenta}; load_state_dict(self, saved) puts them back, as self.momenta = saved['momenta']"
        )
    return f"with x for it, give an object whose state_dict and load_state_dict keep it: {advice(thing)}"


def check_built(name: str, thing: Any) -> None:
    """Raises UsageError for an optimizer whose own `__init__` has not called torch's, and for a
    module of TorchScript.
    """
    if isinstance(thing, torch.nn.Module):
        paths = (
            path
            for path, each in thing.named_modules(prefix=name)
            if any(kind.__module__.startswith("torch.jit.") for kind in type(each).__mro__)
        )
        if (path := next(paths, None)) is not None:
            raise UsageError(
                f"expected modules of Python in the State, found a module of TorchScript (torch.jit.script, torch.jit.trace) at {path}, whose parameters, buffers and "
                "modes cannot be followed: give the module as it is, and for speed compile it, model.compile(); one that no step changes stays outside of the State"
            )
    is_of_torch = isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict
    if is_of_torch and not hasattr(thing, "_optimizer_state_dict_pre_hooks"):
        kind = type(thing).__name__
        raise UsageError(
            f"State({name}=...): {kind} is a torch.optim.Optimizer, and its __init__ has not called super().__init__(params, defaults), so that it has no "
            "state_dict that works. Call it there; or let the class be no Optimizer, with state_dict and load_state_dict that give and take what it keeps itself, "
            "beside the optimizer inside it, which is an entry of its own"
        )
