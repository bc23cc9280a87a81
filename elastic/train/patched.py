"""What code of the loop puts into libraries and classes: `F.relu = f`, `torch.optim.SGD.step = f`.

Such a change holds for the process, and one that restarts does not have it. A library has thousands
of names, and changes some of them itself. So only those are looked at that code of the recipe's
assigns, by a dotted name or with `setattr`; each is resolved without a call of anything. Code that
finds its target by other ways (a variable of a loop over modules, `unittest.mock`) is not seen.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from elastic.train.accesses import VARIABLES, Action, Place, accesses
from elastic.train.callables import is_wrapper
from elastic.train.control_flow import instructions
from elastic.train.namespaces import is_own_namespace


class Target(NamedTuple):
    """Of an assignment. owner: the dotted name of what gets the attribute."""

    owner: tuple[str, ...]
    attribute: str


class Patch(NamedTuple):
    """An attribute of a module or class. value: None if it has none there."""

    name: str
    value: Any
    is_of_library: bool

    @property
    def is_code(self) -> bool:
        return callable(self.value) or is_wrapper(self.value)

    @property
    def chosen(self) -> object:
        """What stays the same where a function is made again from the same lines."""
        return self.value.__code__ if isinstance(self.value, FunctionType) else self.value


@cache
def targets(code: CodeType) -> frozenset[Target]:
    """Of all assignments to attributes of dotted names, in this code alone."""
    found, chain, is_copied = set[Target](), tuple[str, ...](), False
    sets_by_name = "setattr" in code.co_names
    for each, named in zip(instructions(code), accesses(code), strict=True):
        action, place, name = named[-1] if named else (None, None, each.argval)
        if action is Action.READ and place in VARIABLES:
            chain, is_copied = (name,), False
        elif action is Action.READ and place is Place.ATTRIBUTE and chain:
            if is_copied:  # as `owner.attribute *= 2` is compiled
                found.add(Target(chain, name))
            chain, is_copied = (*chain, name), False
        elif each.opname == "COPY" and chain:
            is_copied = True
        else:
            is_assigned = action is Action.WRITE and place is Place.ATTRIBUTE
            is_set = is_assigned or (sets_by_name and each.opname == "LOAD_CONST")
            if chain and is_set and isinstance(name, str):
                found.add(Target(chain, name))
            chain, is_copied = (), False
    return frozenset(found)


def patches(found: frozenset[Target], space: Mapping[str, Any]) -> Iterator[Patch]:
    """What these attributes are now, of modules and classes. space: the code's variables."""
    for target in found:
        owner = space.get(target.owner[0])
        for name in target.owner[1:]:
            owner = _static(owner, name)
        if isinstance(owner, (type, ModuleType)):
            value = _static(owner, target.attribute)
            is_own = is_own_namespace(owner)
            if not is_own or is_wrapper(value):  # other data of its own are looked at anyway
                name = f"class {owner.__qualname__}" if isinstance(owner, type) else owner.__name__
                yield Patch(f"{name}.{target.attribute}", value, not is_own)


def _static(owner: Any, name: str) -> Any:
    """The attribute of a module or class, or None; without a `__getattr__`."""
    if isinstance(owner, ModuleType):
        return vars(owner).get(name)
    kinds = owner.__mro__ if isinstance(owner, type) else ()
    return next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)
