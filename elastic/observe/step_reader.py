"""The lines of a run's metrics, some thousands at a time, each once: a reader goes on where it was.

A fault begins a new file (metrics_files.py), which is read from its start. msgspec takes a
twentieth of the time of json, where each line of a text is that of a step, and has no names that
did not come before. Another text is read line by line, with the same rules (step_line.py), and its
names are known from then on. A line that cannot be read is counted; a last line without its end is
not there yet.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from elastic.observe import metrics_files, step_line
from elastic.observe.log import parse_lines, parsed_and_unreadable
from elastic.observe.step_batch import ABSENT, StepBatch, batch_of, with_values
from elastic.observe.step_line import OwnFields, StepLine
from elastic.system.growing_file import GrowingFile

MOST_NAMES = 200  # of the recipe's values that are read at once
# Texts need not be UTF-8, nor have an end to their brackets.
_UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError
# What no name of a field may have in msgspec.
_NO_FIELD = re.compile(r'[\\"\x00-\x1f\ud800-\udfff]')


class StepReader:
    def __init__(self, path: Path, *, with_values: bool = False) -> None:
        """path: `metrics.jsonl`; a missing file has no steps. with_values: else a line's own
        fields alone are read, which takes less time.
        """
        self._path, self._with_values = path, with_values
        self._file: tuple[Path, GrowingFile] | None = None
        self._names: list[str] = []  # of the recipe's values, as far as they were seen
        self._decoder = _decoder_of([]) if with_values else msgspec.json.Decoder[Any](OwnFields)

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
            batch = self._batch(text)
            yield replace(batch, num_unreadable=batch.num_unreadable + file.num_left_out - too_long)
            too_long = file.num_left_out
        if is_first:  # there is no file: the run was set aside
            yield None

    def close(self) -> None:
        if self._file is not None:
            self._file[1].close()
        self._file = None

    def _newest_file(self) -> GrowingFile:
        path = metrics_files.newest_file(self._path)
        if self._file is None or self._file[0] != path:
            self.close()
            self._file = path, GrowingFile(path)
        return self._file[1]

    def _batch(self, text: bytes) -> StepBatch:
        if self._with_values:  # mostly the other lines have the names of the first one
            self._learn(parse_lines([text[: text.find(b"\n")]], step_line.parse))
        decoded = self._decoded(text)
        if decoded is not None:
            return batch_of(decoded, self._values_in(decoded))
        lines, unreadable = parsed_and_unreadable(text.split(b"\n"), step_line.parse)
        self._learn(lines)
        batch = with_values(lines) if self._with_values else batch_of(lines)
        return replace(batch, num_unreadable=len(unreadable))

    def _learn(self, lines: Iterable[StepLine]) -> None:
        """The names of these values, as far as the decoder can know them, if there are few."""
        found = dict.fromkeys(name for line in lines for name in line.values)
        new = [name for name in found if name not in self._names and not _NO_FIELD.search(name)]
        if self._with_values and new and len(self._names) + len(new) <= MOST_NAMES:
            self._names += new
            self._decoder = _decoder_of(self._names)

    def _decoded(self, text: bytes) -> list[Any] | None:
        """None unless each line is that of a step, and has no new names."""
        # Where each line begins and ends as an object does, none goes on in the next one, since
        # JSON has a comma between those braces: as many objects as lines are one in each.
        if not text.startswith(b"{"):
            return None
        found = np.frombuffer(text, np.uint8)
        ends = np.flatnonzero(found == ord("\n"))
        if not ((found[ends[:-1] + 1] == ord("{")).all() and (found[ends - 1] == ord("}")).all()):
            return None
        try:
            decoded = self._decoder.decode_lines(text)
        except _UNREADABLE:
            return None
        return decoded if len(decoded) == len(ends) else None

    def _values_in(self, lines: Sequence[Any]) -> dict[str, list[Any]]:
        return {name: [*map(attrgetter(f"value_{at}"), lines)] for at, name in enumerate(self._names)}


def _decoder_of(names: Sequence[str]) -> "msgspec.json.Decoder[Any]":
    # A name may be any text, and a field of a class may not.
    fields = [(f"value_{at}", Any, ABSENT) for at in range(len(names))]
    kind = msgspec.defstruct(
        "_LineWithValues",
        fields,
        bases=(OwnFields,),
        rename={f"value_{at}": name for at, name in enumerate(names)},
        gc=False,
        forbid_unknown_fields=True,
    )
    return msgspec.json.Decoder(kind)
