"""`elastic-train`, as it is installed: Ctrl-C ends it with one line from its first import on."""

from typing import NoReturn

from elastic.system import stop_signals


def command() -> NoReturn:
    stop_signals.end_at_once()
    from elastic import cli

    cli.command()
