"""`elastic-train`, as it is installed: Ctrl-C ends it with one line from its first import on."""

from typing import NoReturn

from elastic.system import command_end


def command() -> NoReturn:
    command_end.end_at_once()
    from elastic import cli

    cli.command()
