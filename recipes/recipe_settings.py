"""A recipe's settings are one frozen dataclass, and its command line is made of its fields."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from typing import Any, Protocol, TypeVar


class Settings(Protocol):
    def problem(self) -> str | None:
        """What is wrong with the values together, or None."""


S = TypeVar("S", bound=Settings)


def option(default: Any, text: str, *choices: str) -> Any:
    """A field of settings: its default, the text of `--help`, and the values that it may have."""
    return field(default=default, metadata={"help": text, "choices": choices or None})


def parse(kind: type[S], prog: str, description: str, arguments: Sequence[str] | None = None) -> S:
    """From the command line; a value that makes no sense ends in exit code 2 and a message."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for setting in fields(kind):  # type: ignore[arg-type] # every one of them is a dataclass
        assert setting.default is not MISSING
        parser.add_argument("--" + setting.name.replace("_", "-"), **_argument(setting.default, setting))
    settings = kind(**vars(parser.parse_args(arguments)))
    problem = settings.problem()
    if problem is not None:
        parser.error(problem)
    return settings


def too_small(settings: Any, **least: int) -> str | None:
    """Which whole number is below its least value, or None."""
    for name, lowest in least.items():
        if getattr(settings, name) < lowest:
            return f"--{name.replace('_', '-')} must be at least {lowest}, not {getattr(settings, name)}"
    return None


def not_a_rate(settings: Any, *names: str) -> str | None:
    """Which number is negative or not finite, or None."""
    for name in names:
        if not 0 <= getattr(settings, name) < math.inf:
            return (
                f"--{name.replace('_', '-')} must be finite and not negative, not {getattr(settings, name)}"
            )
    return None


def _argument(default: Any, setting: Any) -> dict[str, Any]:
    if isinstance(default, bool):
        return {"action": "store_true", "help": setting.metadata["help"]}
    return {"default": default, "type": type(default), **setting.metadata}
