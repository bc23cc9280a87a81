"""An entry of a saved state is its tensors under the names that the object's state_dict gave them.

`model` is all that an object has, `model.encoder` what begins so, with the rest of each name. What
is not a tensor is never left out of an entry in silence: an entry with such a value is refused.
"""

from collections.abc import Iterator
from typing import Any

from elastic.errors import UsageError

_LISTS = ("list", "tuple")
_NAMED_AT_MOST = 6


def tensors_of(document: dict[str, Any], entry: str) -> dict[str, str]:
    """By name in the entry, in its order: each tensor's name in the image.

    document: JSON of all objects of a State, as train/state/document.py writes it. Raises
    UsageError for an entry that is not there, or that has other values than tensors.
    """
    leaves: dict[str, str | None] = {}
    for path, tensor in (leaf for name, value in document.items() for leaf in _leaves(value, name)):
        # Of {"a.b": ..., "a": {"b": ...}} one would take the place of the other.
        leaves[path] = None if path in leaves else tensor
    found = {path: tensor for path, tensor in leaves.items() if path == entry or path.startswith(f"{entry}.")}
    if not found:
        raise UsageError(_not_there(list(leaves), document, entry))
    if others := [path for path, tensor in found.items() if tensor is None]:
        raise UsageError(
            f"expected tensors alone in the entry {entry}, found other values, or two of one name, in {_listed(others)}; "
            f"give --entry NAME for a part that has tensors alone, such as {_example(leaves, entry)}"
        )
    # A tensor that is the entry itself has the last part of its name.
    cut = len(entry) + 1 if entry not in found else entry.rfind(".") + 1
    return {path[cut:]: tensor for path, tensor in found.items() if tensor is not None}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str | None]]:
    """Dotted name and image's name of each tensor, None for another value, of what lies below."""
    if not isinstance(value, dict) or len(value) != 1:
        yield path, None
        return
    (kind, content), *_ = value.items()
    if kind == "tensor":
        yield path, content if isinstance(content, str) else content[0]
    elif kind in ("float", "float64"):
        yield path, None
    else:
        items = enumerate(content) if kind in _LISTS else content[0] if kind == "module" else content
        for name, item in items:
            yield from _leaves(item, f"{path}.{name}")


def _not_there(paths: list[str], document: dict[str, Any], entry: str) -> str:
    """Names what there is at the deepest level that the wanted name shares with a saved one."""
    if entry in document:
        return f"expected tensors in the entry {entry}, found none in it; give another --entry"
    above = entry
    while above and not any(path.startswith(f"{above}.") for path in paths):
        above = above.rpartition(".")[0]
    begin = f"{above}." if above else ""
    below = dict.fromkeys(
        begin + path.removeprefix(begin).partition(".")[0] for path in paths if path.startswith(begin)
    )
    return f"expected an entry {entry}, found {_listed(list(below) or list(document), most=50)}; give --entry NAME"


def _example(leaves: dict[str, str | None], entry: str) -> str:
    parts = dict.fromkeys(path.rpartition(".")[0] for path in leaves if path.startswith(f"{entry}."))
    whole = (
        part
        for part in parts
        if part != entry
        and all(tensor is not None for path, tensor in leaves.items() if path.startswith(f"{part}."))
    )
    tensors = (path for path, tensor in leaves.items() if path.startswith(f"{entry}.") and tensor is not None)
    return next(whole, None) or next(tensors, "model")


def _listed(names: list[str], most: int = _NAMED_AT_MOST) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
