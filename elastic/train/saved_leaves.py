"""Whether the state_dict of an object has what a look found to change in that object.

An object's attribute need not have the name under which its state_dict gives it, nor be given as it
is: `torch.stack`, `tolist()` and flat vectors count as well.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from elastic.snapshot.image import tensor_bytes
from elastic.train.flat_state import tensor_sums
from elastic.train.object_marks import array_checksum, leaves, storage_of
from elastic.train.words import MANY_ITEMS, hash_of_many, plain_text

MANY_NUMBERS = MANY_ITEMS


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedNumbers:
    """Texts of the numbers in the state_dict of an object of the State; none of a module's.

    contents: what the marks of its dicts, lists and arrays would be, as object_walk.py makes them.
    """

    is_module: bool
    numbers: frozenset[str]
    contents: frozenset[Any] = frozenset()


class SavedLeaves:
    """What the state_dicts hold at one look, taken where it is needed: most looks need none of it.

    It lasts for a look alone: tensors would keep alive the arrays that they are views of, which a
    trial load takes for a sign that the recipe holds them.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._known: dict[str, list[tuple[str, Any]]] = {}
        self._dicts: dict[str, Any] = {}
        self._keys: dict[str, frozenset[str]] = {}
        self._storages: set[int] | None = None

    def of(self, name: str) -> list[tuple[str, Any]]:
        """Those of the object `name`, each with its key. Without State.flatten, which encodes."""
        if name not in self._known:
            self._dicts[name] = self._objects[name].state_dict()
            self._known[name] = list(leaves(self._dicts[name]))
        return self._known[name]

    def contents(self, name: str, *, with_arrays: bool) -> frozenset[Any]:
        """As SavedNumbers has them. with_arrays: also of tensors, as which arrays are saved."""
        tensors = self.tensors(name)[:MANY_NUMBERS] if with_arrays else []
        arrays = [each.detach().numpy() for each in tensors if _is_array(each)]
        return frozenset([*map(array_checksum, arrays), *_container_marks(self._dicts[name])])

    def keys(self, name: str) -> frozenset[str]:
        if name not in self._keys:
            self._keys[name] = frozenset(key.rpartition(".")[2].strip("_") for key, _ in self.of(name))
        return self._keys[name]

    def tensors(self, name: str) -> list[Tensor]:
        return [value for _, value in self.of(name) if isinstance(value, Tensor)]

    def has_keys_of(self, thing: Any) -> bool:
        """Whether it is a dict with a key of some of them, as a copy of a state_dict has."""
        if not isinstance(thing, dict):
            return False
        return any(key in thing for name in self._objects for key, _ in self.of(name) if "." in key)

    def storages(self) -> set[int]:
        """The addresses of all their tensors' memory."""
        if self._storages is None:
            tensors = (tensor for name in self._objects for tensor in self.tensors(name))
            self._storages = {storage_of(tensor) for tensor in tensors} - {0}
        return self._storages

    def clear(self) -> None:
        self._known.clear()
        self._dicts.clear()


def _is_array(tensor: Tensor) -> bool:
    has_memory = tensor.device.type == "cpu" and bool(storage_of(tensor))
    return has_memory and tensor.dtype is not torch.bfloat16 and not tensor.is_conj() and not tensor.is_neg()


def _container_marks(value: Any) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Their lengths and the numbers and words in them, of those that have any."""
    if not isinstance(value, (dict, list, tuple)):
        return
    every = -(-len(value) // MANY_NUMBERS) or 1
    items = list(islice(value.values(), MANY_NUMBERS)) if isinstance(value, dict) else value[::every]
    plain = [each for each in items if type(each) in (bool, int, float, str, type(None))]
    if plain:
        marks = [hash(each) if type(each) is str else each for each in plain]
        whole = hash_of_many(value) if len(plain) == len(items) else ()
        yield len(value), (*marks, *whole)
    for each in items if len(plain) < len(items) else ():
        yield from _container_marks(each)


def extra_keys(module: nn.Module) -> frozenset[str]:
    """Those of what the module's own get_extra_state gives, which its state_dict saves."""
    if type(module).get_extra_state is nn.Module.get_extra_state:
        return frozenset()
    return frozenset(key.strip("_") for key, _ in leaves(module.get_extra_state()))


def saves_by_own_code(module: nn.Module) -> bool:
    """Whether its state_dict may give more, less or other than parameters and buffers."""
    return any(extra_keys(part) or _has_own_state_dict(part) for part in module.modules())


def left_out(name: str, module: nn.Module, of_state: SavedLeaves) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers that a state_dict of its own or a hook leaves out.

    One that gives as many tensors under other names has left out none.
    """
    parts = list(module.named_modules(remove_duplicate=False))
    if not any(_has_own_state_dict(part) for _, part in parts):
        return []
    owned = {f"{path}.{key}".lstrip("."): each for path, part in parts for key, each in _persistent(part)}
    given = [key for key, value in of_state.of(name) if isinstance(value, Tensor)]
    return [] if len(given) >= len(owned) else [each for each in owned.items() if each[0] not in given]


def _has_own_state_dict(module: nn.Module) -> bool:
    kind = type(module)
    is_of_torch = kind.state_dict is nn.Module.state_dict
    is_of_torch = is_of_torch and kind._save_to_state_dict is nn.Module._save_to_state_dict  # noqa: SLF001
    return not is_of_torch or bool(module._state_dict_hooks)  # noqa: SLF001


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    buffers = module._buffers.items()  # noqa: SLF001
    lost = module._non_persistent_buffers_set  # noqa: SLF001
    kept = [(name, each) for name, each in buffers if name not in lost]
    for name, each in (*module._parameters.items(), *kept):  # noqa: SLF001
        if each is not None:
            yield name, each


def holds_values(known: SavedNumbers, leaves_of: list[Tensor], tensor: Tensor) -> bool:
    """Whether the values of a tensor are those of a leaf, or a part of one.

    As of torch.stack or of a flat vector. leaves_of: the tensors of the object's state_dict.
    """
    alike = [each for each in leaves_of if each.shape == tensor.shape and each.dtype == tensor.dtype]
    if any(tensor_sums(each) == tensor_sums(tensor) for each in alike):
        return True
    if known.is_module or storage_of(tensor) == 0:
        return False
    if tensor.numel() <= MANY_NUMBERS and all(
        plain_text(each) in known.numbers for each in tensor.flatten().tolist()
    ):
        return True  # as of tolist()
    wanted = _bytes_of(tensor)
    larger = [
        each
        for each in leaves_of
        if each.numel() >= tensor.numel() and each.is_complex() == tensor.is_complex() and storage_of(each)
    ]
    return any(wanted in _bytes_of(each.detach().to(tensor.dtype)) for each in larger)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor_bytes(tensor.cpu()).numpy().tobytes()
