"""The lines of a run's metrics, some thousands at a time, each once: a reader goes on where it was.

A fault begins a new file (metrics_files.py), which is read from its start. msgspec takes a
twentieth of the time of json. Where it finds anything but one line of a step in each line of text,
those lines are read one by one as all others read them (step_line.py), so that the same lines
count. A line that cannot be read is counted; a last line without its end is not there yet.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from elastic.observe import metrics_files, step_line
from elastic.observe.log import parsed_and_unreadable
from elastic.observe.step_batch import ABSENT, StepBatch, batch_of, with_values
from elastic.observe.step_columns import StepColumns
from elastic.observe.step_line import WHOLE_BOUND
from elastic.system.growing_file import GrowingFile
from elastic.system.untrusted import LARGEST

MOST_NAMES = 200  # of the recipe's values that the fast reader knows
# Numbers beyond these are left to the other reader, which has the same limits.
_Whole = Annotated[int, msgspec.Meta(gt=-WHOLE_BOUND, lt=WHOLE_BOUND)]
_Number = Annotated[float, msgspec.Meta(gt=-float(LARGEST), lt=float(LARGEST))]


class _Line(msgspec.Struct, gc=False):
    """As StepLine; what has any type there is not looked at."""

    step: _Whole
    epoch: _Whole = 0
    loss: Any = None
    chain: Any = None
    world_size: _Whole = 0
    generation: _Whole = 0
    time: _Number | None = None
    seconds: _Number | None = None
    audited: bool | None = None
    slowest_rank: _Whole | None = None
    slowest_s: _Number | None = None
    others_s: _Number | None = None


_OWN_NAMES = frozenset(_Line.__struct_fields__)
# Texts need not be UTF-8, nor have an end to their brackets.
_UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError
# A record of any names, to learn those that the recipe logs.
_RECORDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# What no name of a field may have in msgspec; lines with such a name are read one by one.
_NO_FIELD = re.compile(r'[\\"\x00-\x1f]')


class StepReader:
    def __init__(self, path: Path, *, with_values: bool = False) -> None:
        """path: `metrics.jsonl`; one that is missing has no steps. with_values: else a line's own
        fields alone are read, which takes less time.
        """
        self._path, self._with_values = path, with_values
        self._file: tuple[Path, GrowingFile] | None = None
        self._names: list[str] = []  # of the recipe's values, as far as they were seen
        self._decoder = _decoder_of(self._names, with_values=with_values)

    def batches(self) -> Iterator[StepBatch | None]:
        """What was completed since the last call. None: what came before does not count any more.

        Raises OSError.
        """
        file = self._newest_file()
        is_first, too_long = True, file.num_left_out
        for text in file.texts_to_end():
            if is_first and file.started_over:
                yield None
            is_first = False
            yield self._batch(text, file.num_left_out - too_long)
            too_long = file.num_left_out
        if is_first:  # there is no file: the run was set aside
            yield None

    def _newest_file(self) -> GrowingFile:
        path = metrics_files.newest_file(self._path)
        if self._file is None or self._file[0] != path:
            self.close()
            self._file = path, GrowingFile(path)
        return self._file[1]

    def _batch(self, text: bytes, too_long: int) -> StepBatch:
        """too_long: how many lines had no room in a read, beside those of the text."""
        decoded, num_unreadable = self._decoded(text), too_long
        if decoded is not None:
            batch = batch_of(decoded, self._values_in(decoded) if self._with_values else None)
        else:
            lines, unreadable = parsed_and_unreadable(text.split(b"\n"), step_line.parse)
            num_unreadable += len(unreadable)
            batch = with_values(lines) if self._with_values else batch_of(lines)
        return replace(batch, num_unreadable=num_unreadable) if num_unreadable else batch

    def close(self) -> None:
        if self._file is not None:
            self._file[1].close()
        self._file = None

    def _decoded(self, text: bytes) -> list[Any] | None:
        """None unless each line is that of a step, as far as this reader knows."""
        num_lines = _num_objects(text)
        if num_lines is None:
            return None
        for _ in range(2):
            try:
                decoded = self._decoder.decode_lines(text)
            except _UNREADABLE:
                if not (self._with_values and self._has_learnt(text)):
                    return None
            else:
                return decoded if len(decoded) == num_lines else None
        return None

    def _has_learnt(self, text: bytes) -> bool:
        """Whether there are names that the decoder did not know and can know, and not too many."""
        try:
            records = _RECORDS.decode_lines(text)
        except _UNREADABLE:
            return False
        known = {*self._names} | _OWN_NAMES
        found = dict.fromkeys(name for record in records for name in record)
        new = [name for name in found if name not in known]
        if not new or len(self._names) + len(new) > MOST_NAMES or any(map(_NO_FIELD.search, new)):
            return False
        self._names += new
        self._decoder = _decoder_of(self._names, with_values=True)
        return True

    def _values_in(self, lines: Sequence[Any]) -> dict[str, list[Any]]:
        return {name: [*map(attrgetter(_attribute(at)), lines)] for at, name in enumerate(self._names)}


def read_columns(path: Path, ahead: Mapping[int, float]) -> StepColumns:
    """path: `metrics.jsonl`; one that is missing has no steps. ahead: as in StepBatch.moved.

    Raises OSError.
    """
    found = StepColumns()
    with closing(StepReader(path)) as reader:
        for batch in reader.batches():
            if batch is not None:
                found.add(batch.moved(ahead))
    return found


def _num_objects(text: bytes) -> int | None:
    """How many lines there are; None unless each one begins and ends as an object does.

    Then none goes on in the next line, since JSON has a comma between those braces: where there are
    as many objects as lines, each line is one. Other readers count no others.
    """
    found = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(found == ord("\n"))
    is_whole = (
        text.startswith(b"{")
        and (found[ends - 1] == ord("}")).all()
        and (found[ends[:-1] + 1] == ord("{")).all()
    )
    return len(ends) if is_whole else None


def _decoder_of(names: Sequence[str], *, with_values: bool) -> "msgspec.json.Decoder[Any]":
    if not with_values:
        return msgspec.json.Decoder(_Line)
    # A name may be any text, and a field of a class may not.
    fields = [(_attribute(at), Any, ABSENT) for at in range(len(names))]
    rename = {_attribute(at): name for at, name in enumerate(names)}
    kind = msgspec.defstruct(
        "_LineWithValues", fields, bases=(_Line,), rename=rename, gc=False, forbid_unknown_fields=True
    )
    return msgspec.json.Decoder(kind)


def _attribute(at: int) -> str:
    return f"value_{at}"
