"""Each option of the training command has a variable: `ELASTIC_MAX_NODES` for `--max-nodes`.

An empty variable says nothing, as an absent one. What the command line gives counts
more. A value that the option would refuse is refused here, with the variable's name.
"""

import argparse
import difflib
from collections.abc import Mapping
from typing import Any

from elastic.config.options import FLAGS, Options, reader_of
from elastic.errors import UsageError

PREFIX = "ELASTIC_"
VARIABLES = {name: PREFIX + flag.removeprefix("--").replace("-", "_").upper() for name, flag in FLAGS.items()}
_FLAG_VALUES = {"1": True, "0": False}


def values_of(variables: Mapping[str, str]) -> dict[str, Any]:
    """By field of Options, what the variables say. Raises UsageError."""
    return {
        name: _value(name, variable, variables[variable])
        for name, variable in VARIABLES.items()
        if variables.get(variable)
    }


def _value(name: str, variable: str, text: str) -> Any:
    read = reader_of(name)
    try:
        if read is None:
            if text not in _FLAG_VALUES:
                raise argparse.ArgumentTypeError(f"expected 1 or 0, found {text!r}")
            return _FLAG_VALUES[text]
        return read(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(
            f"{variable}: {error}; correct or unset the variable, which stands for {FLAGS[name]}"
        ) from None


def in_force(options: Options, values: Mapping[str, Any]) -> str:
    """Which options have the values of variables; empty for none."""
    return ", ".join(
        f"{FLAGS[name]} by {VARIABLES[name]}"
        for name, value in values.items()
        if getattr(options, name) == value
    )


def misspelt(variables: Mapping[str, str], others: frozenset[str]) -> list[str]:
    """Sentences about variables that look like one of these. others: that mean something else.

    Other programs have variables that begin so too; those are none of this program's business.
    """
    known = {*VARIABLES.values(), *others}
    unknown = sorted(name for name in variables if name.startswith(PREFIX) and name not in known)
    return [
        f"the variable {name} stands for no option; did you mean {close[0]}?"
        for name in unknown
        if (close := difflib.get_close_matches(name, VARIABLES.values(), n=1, cutoff=0.9))
    ]
