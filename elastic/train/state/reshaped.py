"""A module whose tensors the loop adds, removes or reshapes could not be loaded, and is refused.

A process that resumes builds its modules as the recipe does at the top, and loads the saved tensors
into them by name and shape. Where a class has a load of its own, it may build what is missing
first: its tensors are not looked at.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from elastic.errors import StateNotSavable
from elastic.train.state.load import has_own_load

MOST_NAMED = 3  # beside the first
_PLAIN_LOAD = nn.Module._load_from_state_dict  # noqa: SLF001 - what classes with a load of their own replace


def shapes_of(tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """By entry of the state, of the modules' own tensors."""
    return {entry: tuple(each.shape) for entry, each in tensors.items() if entry.split(".")[0] in modules}


def check(
    built: Mapping[str, tuple[int, ...]],
    now: Mapping[str, tuple[int, ...]],
    modules: Mapping[str, nn.Module],
) -> None:
    """built, now: `shapes_of` when the loop began, and since. Raises StateNotSavable."""
    if built == now:
        return
    for entry in sorted(built.keys() | now.keys()):
        before, found = built.get(entry), now.get(entry)
        if before != found and not _loads_by_itself(modules, entry):
            raise StateNotSavable(
                f"state entry {entry}: expected {_in_words(before)}, as when the loop began, found {_in_words(found)}. A process that resumes "
                "builds the model as it was built at the top, and could not load it. Build it in its final shape, with parts of it frozen, masked "
                "or unused at first (for pruning: prune.identity(layer, 'weight') at the top); register buffers in __init__ in their final shape, "
                "or with persistent=False; or give the model a load_state_dict that first builds the layers that the saved names need"
            )


def _in_words(shape: tuple[int, ...] | None) -> str:
    return "no such tensor" if shape is None else f"the shape {list(shape)}"


def _loads_by_itself(modules: Mapping[str, nn.Module], entry: str) -> bool:
    """Whether the module of this tensor, or one around it, has a load of its own."""
    name, *path = entry.split(".")
    module: object = modules[name]
    if has_own_load(module):
        return True
    for part in path:
        if not isinstance(module, nn.Module):
            return False
        its = type(module)._load_from_state_dict  # noqa: SLF001
        if its is not _PLAIN_LOAD and not its.__module__.startswith("torch.nn.modules."):
            return True
        if module._load_state_dict_pre_hooks:  # noqa: SLF001
            return True
        module = getattr(module, part, None)
    return False


def sized_by_data(names: Sequence[str]) -> str:
    """The refusal of buffers to which a forward gives another size, as that of the first data."""
    first, *others = names
    more = (
        f" (and {', '.join(others[:MOST_NAMED])}{' and others' * (len(others) > MOST_NAMED)})"
        if others
        else ""
    )
    return (
        f"forward gave buffer {first}{more} another size, so that it was not that of the state, from which each shard begins. Observers of "
        "quantization and other layers that initialise themselves do that in their first forward: run one forward on a fixed batch before "
        "elastic.State, as in `with torch.no_grad(): model(example)`; it gives buffers their sizes. Else register them in __init__ in their final shape"
    )
