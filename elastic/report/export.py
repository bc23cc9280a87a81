"""What a committed state holds of one entry becomes a file that other programs load.

The whole payload is read once, and compared with its commit record; the file has its name after
that, once all of it is on the disk. It does not promise that an older program knows
each dtype. Tensors that share their memory, as tied weights do, are written under each of their
names, so that `load_state_dict` finds all of them.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from elastic.checkpoint.find_parent import find
from elastic.checkpoint.payload_check import Keep, check_state
from elastic.checkpoint.record import CommitRecord
from elastic.config.identity import Origin
from elastic.errors import UsageError
from elastic.snapshot import safetensors_header
from elastic.snapshot.safetensors_header import DOCUMENT, STRIDES, TIES
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.system.files import new_file

SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".pth", ".pt")
FORM = "RUN[@STEP]"
_NAMED_AT_MOST = 6


def export(origin: Origin, file: str, entry: str, clock: Clock, *, overwrite: bool) -> str:
    """Write the file; returns what was written, in a sentence. Raises UsageError, StoreFailed."""
    path = Path(file)
    _check(origin, file, path, overwrite=overwrite)  # before a large state is read
    found: list[_Exported] = []
    try:
        with new_file(path, replaces=overwrite) as opened:

            def keep(store: Store, record: CommitRecord, clock: Clock) -> None:
                of = f"step {record.step} of {origin.run_dir.url}"

                def keeps(header: safetensors_header.Header) -> Keep:
                    file = opened if path.suffix == SAFETENSORS else None
                    found[:] = [_Exported(header, of, entry, file)]
                    return found[0].keep

                check_state(store, record, clock, keeps)

            state = find(origin, clock, lambda line: print(line, file=sys.stderr), "export", keep)
            found[0].end(opened)
            size_bytes = opened.seek(0, os.SEEK_END)
    except FileExistsError:
        raise UsageError(_is_taken(path)) from None
    except OSError as error:
        raise UsageError(
            f"expected to write {path}, found: {error}; nothing was exported. Make room, or take another FILE"
        ) from error
    return f"{path}: {len(found[0].names)} tensors, {size_bytes} bytes, {entry} of {state}"


def _check(origin: Origin, file: str, path: Path, *, overwrite: bool) -> None:
    """Raises UsageError."""
    if path.suffix not in SUFFIXES or "://" in file:
        raise UsageError(
            f"expected a local FILE that ends in {SAFETENSORS}, or in .pth or .pt as torch.save writes, found {file!r}"
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


class _Exported:
    """The tensors of an entry, put together while the state is read; only they are kept.

    In a safetensors file each name has bytes of its own; what torch.save is to write lies in memory
    until then, tied tensors once.
    """

    def __init__(self, header: safetensors_header.Header, of: str, entry: str, file: BinaryIO | None) -> None:
        """of: the state, in words. file: of the first kind. Raises UsageError for the entry."""
        try:
            self.names = tensors_of(header.document["state"], entry)
        except UsageError as error:
            raise UsageError(f"{of}: {error}") from None
        self._layers = _layers(header, entry)
        stored = {name: header.ties.get(tensor, tensor) for name, tensor in self.names.items()}
        first = {tensor: name for name, tensor in reversed(stored.items())}
        metadata, written = {"format": "pt"}, stored
        if file is None:
            written = {name: tensor for name, tensor in stored.items() if first[tensor] == name}
            ties = {name: first[tensor] for name, tensor in stored.items() if first[tensor] != name}
            strides = {name: header.strides[t] for name, t in written.items() if t in header.strides}
            texts = map(json.dumps, ({}, ties, strides))
            metadata = dict(zip((DOCUMENT, TIES, STRIDES), texts, strict=True))
        entries = {name: header.entries[tensor] for name, tensor in written.items()}
        plan = safetensors_header.plan({name: (each.dtype, each.shape) for name, each in entries.items()})
        self._head = safetensors_header.head(plan.entries, metadata)
        self._file = file
        self._size_bytes = len(self._head) + plan.size_bytes
        self._memory = memoryview(bytearray(0 if file is not None else self._size_bytes))
        # (where it begins in the state's image, its end there, where it begins in the file)
        self._places = [
            (entries[name].start, entries[name].end, len(self._head) + at) for name, at in plan.starts
        ]
        self._put(0, memoryview(self._head))

    def keep(self, at: int, piece: memoryview) -> None:
        """Bytes of the image of the whole state. Raises OSError."""
        for start, end, there in self._places:
            if own := piece[max(0, start - at) : max(0, end - at)]:
                self._put(there + max(0, at - start), own)

    def _put(self, at: int, data: memoryview) -> None:
        if self._file is None:
            self._memory[at : at + len(data)] = data
        else:
            while data:
                written = os.pwrite(self._file.fileno(), data, at)
                at, data = at + written, data[written:]

    def end(self, file: BinaryIO) -> None:
        """Everything is there. Raises OSError."""
        if self._file is not None:
            os.truncate(file.fileno(), self._size_bytes)  # another state may have been begun before
            return
        import torch  # takes seconds

        from elastic.snapshot import image as images
        from elastic.train.state.flat import with_layer_versions

        tensors, _ = images.read(self._memory)
        # A view would be written with all of the memory. Tied ones stay one.
        copies = {id(each): each.clone() for each in tensors.values()}
        found = {name: copies[id(tensors[name])] for name in self.names}
        try:
            torch.save(with_layer_versions(found, self._layers) if self._layers else found, file)
        except RuntimeError as error:  # what torch makes of a write that failed
            raise OSError(f"torch.save: {error}") from error
