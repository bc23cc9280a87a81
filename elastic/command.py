"""`elastic-train`, as it is installed: Ctrl-C ends it with one line from its first import on."""

from typing import NoReturn

from elastic.system import interrupt


def command() -> NoReturn:
    interrupt.end_at_once()
    from elastic import cli

    cli.command()
