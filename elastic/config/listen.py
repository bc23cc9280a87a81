"""Where a command that a browser asks listens: at the loopback address, unless told otherwise."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.config.options import WordParser
from elastic.errors import UsageError
from elastic.system.addresses import split_endpoint

DEFAULT_PORT = 8080
_DEFAULT = f"127.0.0.1:{DEFAULT_PORT}"
# The system chooses the port.
_ANY_PORT = re.compile(r"(.+):0+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """`elastic-train serve RUN [--listen HOST:PORT]`. host: with the brackets of an IPv6 address.

    port: 0 for one that the system chooses.
    """

    run: str
    host: str
    port: int


def parse_serve(argv: Sequence[str]) -> Listening:
    """Read the words after `elastic-train serve`; raises UsageError."""
    parser = WordParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--listen", default=_DEFAULT)
    known, runs = parser.parse_known_args(argv)
    if unknown := [word for word in runs if word.startswith("-")]:
        raise UsageError(f"serve knows --listen HOST:PORT and no other option, found {unknown[0]}")
    if len(runs) != 1:
        raise UsageError(
            f"serve needs 1 run directory, found {len(runs)}; write elastic-train serve runs/NAME"
        )
    chosen = _ANY_PORT.fullmatch(known.listen)
    host, port = split_endpoint(chosen[1] if chosen else known.listen, DEFAULT_PORT)
    return Listening(run=runs[0], host=host, port=0 if chosen else port)
