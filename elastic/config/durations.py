"""How often something is done, or how long it may take, as a person writes it and as a program reads it: what is written down reads back as the same.

An agent hands these to its workers as text. Nothing here looks at a clock.
"""

import re
from dataclasses import dataclass
from typing import Literal

from elastic.errors import UsageError

_SECONDS_PER_UNIT = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


def duration_s(text: str) -> float | None:
    """Seconds of `30`, `30s`, `0.5min` or `2h`; None for anything else."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)(s|min|h|)", text, re.ASCII)
    return None if match is None else float(match[1]) * _SECONDS_PER_UNIT[match[2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvery:
    """When a checkpoint is due: every `value` steps, every `value` seconds, or (auto, value 0) as the trainer sees fit."""

    kind: Literal["steps", "seconds", "auto"]
    value: float

    @staticmethod
    def parse(text: str) -> "SaveEvery":
        """Read `500steps`, `10min`, `30s`, `2h` or `auto`; raises UsageError for anything else."""
        if text == "auto":
            return SaveEvery(kind="auto", value=0.0)
        if match := re.fullmatch(r"([1-9]\d*)steps?", text, re.ASCII):
            return SaveEvery(kind="steps", value=float(match[1]))
        seconds = None if text[-1:].isdigit() else duration_s(text)  # 500 alone could mean steps
        if not seconds:
            raise UsageError(f"expected 500steps, 30s, 10min, 2h or auto, found {text!r}")
        return SaveEvery(kind="seconds", value=seconds)

    def __str__(self) -> str:
        match self.kind:
            case "auto":
                return "auto"
            case "steps":
                return f"{self.value:.0f}steps"
            case "seconds":
                return f"{self.value!r}".removesuffix(".0") + "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEvery:
    """When a snapshot is taken: every `steps` steps, as often as is cheap (auto), or only where a checkpoint or a planned stop needs one (off)."""

    kind: Literal["steps", "auto", "off"]
    steps: int | None = None

    @property
    def is_off(self) -> bool:
        return self.kind == "off"

    @staticmethod
    def parse(text: str) -> "SnapshotEvery":
        """Read a number of steps, `auto` or `off`; raises UsageError for anything else."""
        if text == "auto":
            return SnapshotEvery(kind="auto")
        if text == "off":
            return SnapshotEvery(kind="off")
        if re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII):
            return SnapshotEvery(kind="steps", steps=int(text))
        raise UsageError(f"expected a number of steps, auto or off, found {text!r}")

    def __str__(self) -> str:
        return self.kind if self.steps is None else str(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangTimeout:
    """When a worker that makes no progress is taken for hung: after `seconds`, after a limit learned from the run (auto), or never (off)."""

    kind: Literal["seconds", "auto", "off"]
    seconds: float | None = None

    @staticmethod
    def parse(text: str) -> "HangTimeout":
        """Read `auto`, `off`, or a duration above 0 (60, 60s, 10min); raises UsageError for anything else."""
        if text == "auto":
            return HangTimeout(kind="auto")
        if text == "off":
            return HangTimeout(kind="off")
        seconds = duration_s(text)
        if not seconds:
            raise UsageError(
                f"expected seconds above 0, a duration (60s, 10min), auto or off, found {text!r}"
            )
        return HangTimeout(kind="seconds", seconds=seconds)

    def __str__(self) -> str:
        return self.kind if self.seconds is None else f"{self.seconds!r}s"
