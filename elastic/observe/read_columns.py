"""The columns of a file of metrics, a few thousand lines at a time, none of which is kept.

msgspec takes a twentieth of the time of json, and keeps the few fields that count alone. Where it
finds anything but one line of a step in each line of text, those lines are read one by one as all
others read them (step_line.py), so that the same lines count.
"""

from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import msgspec

from elastic.observe import metrics_files, step_line
from elastic.observe.log import parse_lines
from elastic.observe.step_columns import GenerationSteps, StepColumns
from elastic.system.growing_file import texts_of
from elastic.system.untrusted import LARGEST

# Numbers beyond these are left to the other reader, which has limits of its own.
_Whole = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Number = Annotated[float, msgspec.Meta(gt=-float(LARGEST), lt=float(LARGEST))]


class _Line(msgspec.Struct, gc=False):
    """As StepLine; what has any type there is not looked at."""

    step: _Whole
    epoch: _Whole = 0
    world_size: _Whole = 0
    generation: _Whole = 0
    time: _Number | None = None
    seconds: _Number | None = None
    audited: bool | None = None
    slowest_rank: _Whole | None = None
    slowest_s: _Number | None = None
    others_s: _Number | None = None


_DECODER = msgspec.json.Decoder(_Line)


def read_columns(path: Path) -> StepColumns:
    """path: metrics.jsonl; one that is missing has no steps. Raises OSError."""
    found = StepColumns()
    for text in texts_of(metrics_files.newest_file(path)):
        decoded = _decoded(text)
        if decoded is None:
            for line in parse_lines(text.split(b"\n"), step_line.parse):
                found.add(line)
        else:
            _add(found, decoded)
    return found


def _decoded(text: bytes) -> list[_Line] | None:
    """None unless each line is that of a step, as far as this reader knows."""
    try:
        decoded = _DECODER.decode_lines(text)
    except (msgspec.MsgspecError, RecursionError):
        return None
    # Two objects in a line, or one in two lines, are none for other readers.
    num_lines, num_begun = text.count(b"\n"), text.count(b"\n{") + text.startswith(b"{")
    return decoded if len(decoded) == num_lines == num_begun else None


def _add(found: StepColumns, decoded: list[_Line]) -> None:
    for generation, group in groupby(decoded, attrgetter("generation")):
        lines = list(group)
        found.last_of[generation] = lines[-1].step
        found.seconds.extend([line.seconds for line in lines if line.seconds is not None])
        if timed := [line for line in lines if line.time is not None]:
            times_s = [line.time for line in timed if line.time is not None]
            found.times_of(generation).extend(times_s)
            own = found.counted.get(generation)
            begin = times_s[0] - (timed[0].seconds or 0.0) if own is None else own.begin
            seconds = 0.0 if own is None else own.seconds
            for line in timed:  # one by one, as the lines would be added
                seconds += line.seconds or 0.0
            found.counted[generation] = GenerationSteps(begin=begin, end=times_s[-1], seconds=seconds)
        for line in lines:
            found.paces[generation].add(line)
        found.num_audited += sum([line.audited is True for line in lines])
    for last in decoded[-1:]:
        found.last_step, found.last_time_s = last.step, last.time
