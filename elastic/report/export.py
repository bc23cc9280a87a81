"""What a committed state holds of one entry becomes a file that other programs load.

The whole payload is read and compared with its commit record before anything is written, and the
file has its name once all of it is on the disk. It does not promise that an older program knows
each dtype. Tensors that share their memory, as tied weights do, are written under each of their
names, so that `load_state_dict` finds all of them.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

from elastic.checkpoint.find_parent import find
from elastic.checkpoint.payload_check import read_state
from elastic.checkpoint.record import CommitRecord
from elastic.config.identity import Origin
from elastic.errors import UsageError
from elastic.snapshot import safetensors_header
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.system.files import new_file

SUFFIXES = (".pth", ".pt")
FORM = "RUN[@STEP]"
_NAMED_AT_MOST = 6


def export(origin: Origin, file: str, entry: str, clock: Clock, *, overwrite: bool) -> str:
    """Write the file; returns what was written, in a sentence. Raises UsageError, StoreFailed."""
    path = Path(file)
    _check(origin, file, path, overwrite=overwrite)  # before a large state is read
    image = memoryview(b"")

    def keep(store: Store, record: CommitRecord, clock: Clock) -> None:
        nonlocal image
        with closing(read_state(store, record, clock)) as memory:
            image = memory.view()

    state = find(origin, clock, lambda line: print(line, file=sys.stderr), "export", keep)
    header = safetensors_header.parse(image)
    try:
        names = tensors_of(header.document["state"], entry)
    except UsageError as error:
        raise UsageError(f"step {state.step} of {state.url}: {error}") from None
    try:
        with new_file(path, replaces=overwrite) as opened:
            _write(opened, image, names, _layers(header, entry))
            size_bytes = opened.tell()
    except FileExistsError:
        raise UsageError(_is_taken(path)) from None
    except OSError as error:
        raise UsageError(
            f"expected to write {path}, found: {error}; nothing was exported. Make room, or take another FILE"
        ) from error
    return f"{path}: {len(names)} tensors, {size_bytes} bytes, {entry} of {state}"


def _check(origin: Origin, file: str, path: Path, *, overwrite: bool) -> None:
    """Raises UsageError."""
    if path.suffix not in SUFFIXES or "://" in file:
        raise UsageError(
            f"expected a local FILE that ends in {' or '.join(SUFFIXES)}, as torch.save writes, found {file!r}"
        )
    if origin.entries:
        raise UsageError(f"export takes {FORM}, found {origin}; give --entry {origin.entries[0]}")
    with suppress(OSError):
        if not overwrite and (path.exists() or path.is_symlink()):
            raise UsageError(_is_taken(path))


def tensors_of(document: dict[str, Any], entry: str) -> dict[str, str]:
    """By name in the entry, in its order: each tensor's name in the image.

    document: JSON of all objects of a State, as train/state/flat.py writes it. An entry is all
    that an object has, as `model`, or what begins with it, as `model.encoder`. Raises UsageError
    for a missing one, or one with other values than tensors: none of them is left out in
    silence.
    """
    leaves: dict[str, str | None] = {}
    for path, tensor in (leaf for name, value in document.items() for leaf in _leaves(value, name)):
        # Of {"a.b": ..., "a": {"b": ...}} one would take the place of the other.
        leaves[path] = None if path in leaves else tensor
    found = {path: tensor for path, tensor in leaves.items() if path == entry or path.startswith(f"{entry}.")}
    if not found:
        beside = [path for path in leaves if path.startswith(f"{entry.partition('.')[0]}.")]
        raise UsageError(
            f"expected an entry {entry!r}, found {_listed(beside or list(document))}; give --entry NAME"
        )
    if others := [path for path, tensor in found.items() if tensor is None]:
        raise UsageError(
            f"expected tensors alone in the entry {entry}, found other values, or two of one name, in {_listed(others)};"
            f" give --entry NAME for a part that has tensors alone"
        )
    # A tensor that is the entry itself has the last part of its name.
    cut = len(entry) + 1 if entry not in found else entry.rfind(".") + 1
    return {path[cut:]: tensor for path, tensor in found.items() if tensor is not None}


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str | None]]:
    """Dotted name and image's name of each tensor below, None for another value."""
    if not isinstance(value, dict) or len(value) != 1:
        yield path, None
        return
    (kind, content), *_ = value.items()
    if kind == "tensor":
        yield path, content if isinstance(content, str) else content[0]
    elif kind in ("float", "float64"):
        yield path, None
    else:
        for name, item in enumerate(content) if kind in ("list", "tuple") else content:
            yield from _leaves(item, f"{path}.{name}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return ", ".join(names[:_NAMED_AT_MOST]) + more


def _is_taken(path: Path) -> str:
    return f"expected a new file, found that {path} exists; take another name, or replace it with --overwrite"


def _layers(header: safetensors_header.Header, entry: str) -> dict[str, dict[str, object]]:
    """The versions of a module's layers, or of a part of it, by layer; empty for anything else."""
    layers = header.document.get("about", {}).get("layers", {})
    thing, _, part = entry.partition(".")
    found = layers.get(thing, {}) if isinstance(layers, dict) else {}
    if not isinstance(found, dict):
        return {}
    if not part:
        return found
    below = {name: about for name, about in found.items() if f"{name}.".startswith(f"{part}.")}
    return {name.removeprefix(part).removeprefix("."): about for name, about in below.items()}


def _write(
    file: BinaryIO, image: memoryview, names: dict[str, str], layers: dict[str, dict[str, object]]
) -> None:
    """As torch.save does, of tensors alone: torch.load reads it with weights_only. Raises OSError.

    layers: the versions of a module's layers, without which some layers refuse a state.
    """
    import torch  # takes seconds

    from elastic.snapshot import image as images
    from elastic.train.state.flat import with_layer_versions

    tensors, _ = images.read(image)
    # A view would be written with all of the image; each in memory of its own, tied ones in one.
    copies = {id(tensors[tensor]): tensors[tensor].clone() for tensor in names.values()}
    found = {name: copies[id(tensors[tensor])] for name, tensor in names.items()}
    try:
        torch.save(with_layer_versions(found, layers) if layers else found, file)
    except RuntimeError as error:  # what torch makes of a write that failed
        raise OSError(f"torch.save: {error}") from error
