"""What a committed state holds of one entry becomes a file that other programs load.

The whole payload is read and compared with its commit record before anything is written, and the
file has its name once all of it is on the disk. It does not promise that an older program knows
each dtype. Tensors that share their memory, as tied weights do, are written under each of their
names, so that `load_state_dict` finds all of them.
"""

import json
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO

from elastic.care.entry import tensors_of
from elastic.checkpoint.find_parent import Asker, find
from elastic.checkpoint.payload_check import read_state
from elastic.checkpoint.record import CommitRecord
from elastic.config.care_options import EXPORT_FORM, ExportOptions
from elastic.config.output_file import refuse_own
from elastic.config.parent import Parent
from elastic.errors import UsageError
from elastic.snapshot import safetensors_header
from elastic.snapshot.safetensors_header import DTYPES, LENGTH, METADATA, Header
from elastic.storage.store import Store
from elastic.system.clock import Clock
from elastic.system.files import new_file

_ALIGN_BYTES = 8


def export(options: ExportOptions, clock: Clock) -> str:
    """Write the file; returns what was written, in a sentence. Raises UsageError, StoreFailed."""
    path = Path(options.file)
    _check_free(path, options)
    image = memoryview(b"")

    def read(store: Store, record: CommitRecord, clock: Clock) -> None:
        nonlocal image
        with closing(read_state(store, record, clock)) as memory:
            image = memory.view()

    asker = Asker(takes=f"export takes {EXPORT_FORM}", cannot="export cannot read")
    state = find(options.origin, clock, lambda line: print(line, file=sys.stderr), asker, read)
    header = safetensors_header.parse(image)
    try:
        names = tensors_of(header.document["state"], options.entry)
    except UsageError as error:
        raise UsageError(f"step {state.step} of {state.url}: {error}") from None
    try:
        with new_file(path, replaces=options.overwrite) as file:
            if path.suffix == ".safetensors":
                _write_safetensors(file, image, header, names, _origin_of(state, options.entry))
            else:
                from elastic.care.torch_file import write  # torch takes seconds to import

                write(file, image, names, _layers(header, options.entry))
            size_bytes = file.tell()
    except FileExistsError:
        raise UsageError(_is_taken(path)) from None
    except OSError as error:
        raise UsageError(
            f"expected to write {path}, found: {error}; nothing was exported. Make room, or take another FILE"
        ) from error
    return f"{path}: {len(names)} tensors, {size_bytes} bytes, {options.entry} of {state}"


def _check_free(path: Path, options: ExportOptions) -> None:
    """Before a large state is read."""
    refuse_own(path)
    with suppress(OSError):
        if path.is_dir():
            raise UsageError(
                f"expected a FILE to write, found the folder {path}; write {path}/model.safetensors"
            )
        if not path.parent.is_dir():
            raise UsageError(f"expected a folder for {path.name}, found none at {path.parent}; make it first")
        if not options.overwrite and (path.exists() or path.is_symlink()):
            raise UsageError(_is_taken(path))


def _is_taken(path: Path) -> str:
    return f"expected a new file, found that {path} exists; take another name, or replace it with --overwrite"


def _origin_of(state: Parent, entry: str) -> dict[str, str]:
    """What the file says of itself. `format` is what other programs look for in files of torch."""
    return {
        "format": "pt",
        "run_id": state.run_id,
        "step": str(state.step),
        "digest": state.digest,
        "entry": entry,
    }


def _layers(header: Header, entry: str) -> dict[str, dict[str, object]]:
    """The versions of the layers of a module or a part of one, by layer; empty for what is none."""
    layers = header.document.get("about", {}).get("layers", {})
    thing, _, part = entry.partition(".")
    found = layers.get(thing, {}) if isinstance(layers, dict) else {}
    if not isinstance(found, dict):
        return {}
    if not part:
        return found
    below = {name: about for name, about in found.items() if f"{name}.".startswith(f"{part}.")}
    return {name.removeprefix(part).removeprefix("."): about for name, about in below.items()}


def _write_safetensors(
    file: BinaryIO, image: memoryview, header: Header, names: dict[str, str], origin: dict[str, str]
) -> None:
    """As the format asks: no gaps, the largest elements first, so that each is aligned."""
    entries = {name: header.entries[header.ties.get(tensor, tensor)] for name, tensor in names.items()}
    ordered = sorted(entries.items(), key=lambda pair: (-DTYPES[pair[1].dtype][1], pair[0]))
    described: dict[str, object] = {METADATA: origin}
    end = 0
    for name, entry in ordered:
        begin, end = end, end + entry.end - entry.start
        described[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    file.write(LENGTH.pack(len(text)) + text)
    for _, entry in ordered:
        file.write(image[entry.start : entry.end])
