"""Every command of `elastic-train` but training: its words become one call, which gives its exit
code.

The docstring of a command is what its help says. Each imports its package when it is called: the
others start sooner.
"""

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import NoReturn, cast

from elastic.config import options
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, StoreFailed, UsageError
from elastic.system import command_end
from elastic.system.clock import SystemClock
from elastic.system.untrusted import printable

_LISTENS = options.ListenAddress(host="127.0.0.1", port=8080)  # no other machine reaches it there
_Words = argparse.Namespace


class _CommandParser(options.WordParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; write {usage_of(self)}")


def usage_of(parser: argparse.ArgumentParser) -> str:
    return " ".join(parser.format_usage().removeprefix("usage: ").split())


def command_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """(the parser of all commands, which shells ask for completions; by name, that of each)."""
    parser = _CommandParser(prog="elastic-train", add_help=False, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(call: Callable[[_Words], int], *runs: str) -> argparse.ArgumentParser:
        own = commands.add_parser(call.__name__, description=call.__doc__, add_help=False, allow_abbrev=False)
        own.set_defaults(call=call)
        for name in runs:
            own.add_argument(name, metavar="RUN")
        return own

    def add_answer(call: Callable[[_Words], int], *runs: str, draws: bool = False) -> argparse.ArgumentParser:
        how = (own := add(call, *runs)).add_mutually_exclusive_group()
        how.add_argument("--json", action="store_true")
        own.set_defaults(html=None)
        if draws:
            how.add_argument("--html", metavar="FILE")
        return own

    check_words = add_answer(check)
    check_words.add_argument("recipe", metavar="RECIPE")
    check_words.add_argument("--steps", metavar="N", type=partial(options.whole, 3))
    add_answer(report, "run", draws=True)
    add_answer(status, "run")
    add(watch, "run").add_argument("--once", action="store_true")
    serve_words = add(serve, "run")
    serve_words.add_argument("--listen", metavar="HOST:PORT", type=options.listen_address, default=_LISTENS)
    add_answer(verify, "run")
    add_answer(diff, "run", "other", draws=True)
    add_answer(runs).add_argument("folder", metavar="FOLDER", nargs="?", default="runs")
    add_answer(clean, "run").add_argument("--yes", action="store_true")
    export_words = add(export)
    export_words.add_argument("state", metavar="RUN[@STEP]", type=options.state_of_run)
    export_words.add_argument("file", metavar="FILE")
    export_words.add_argument("--entry", metavar="NAME", default="model")
    export_words.add_argument("--overwrite", action="store_true")
    add(completion).add_argument("shell", choices=("bash", "zsh"))
    return parser, commands.choices


def run_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """words: those behind the command. Returns the exit code; raises UsageError."""
    ours, recipe_args = options.split_recipe_args(words)
    if "--help" in ours or "-h" in ours:
        print(parser.format_help(), end="")
        return EXIT_COMPLETE
    found = parser.parse_args(ours, argparse.Namespace(recipe_args=recipe_args))
    return cast("int", found.call(found))


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    """A store that does not answer is no finding: that is what 1 means for `diff` and `verify`.

    Ctrl-C ends it with what it has begun, such as a half of a file.
    """
    command_end.raise_from_here(is_second_final=True)
    try:
        yield
    except StoreFailed as error:
        raise UsageError(f"expected the store to answer, found: {error}; try again") from error
    except BrokenPipeError:  # of this command's own output
        raise
    except OSError as error:
        raise UsageError(f"expected files that can be read, found: {error}; try again") from error


def check(words: _Words) -> int:
    """Are a recipe's first steps the same with more workers, killed, drained and resumed?"""
    from elastic.check.check import run_check

    command_end.end_at_once_by((signal.SIGTERM, signal.SIGHUP))
    command_end.raise_from_here()
    asked = options.CheckOptions(
        recipe=words.recipe, recipe_args=words.recipe_args, steps=words.steps, as_json=words.json
    )
    return run_check(asked)


def report(words: _Words) -> int:
    """Steps, time lost, recoveries, the digest; FILE gets them as one page with pictures."""
    from elastic.report import commands

    with _looking():
        return commands.report(words.run, as_json=words.json, html=words.html)


def status(words: _Words) -> int:
    """Where a run stands now."""
    from elastic.report import commands

    with _looking():
        return commands.status(words.run, as_json=words.json)


def verify(words: _Words) -> int:
    """Read all checkpoints and list the damage."""
    from elastic.report import commands

    with _looking():
        return commands.verify(words.run, as_json=words.json)


def diff(words: _Words) -> int:
    """The first step at which two runs differ; FILE gets both as one page with pictures."""
    from elastic.report import commands

    with _looking():
        return commands.diff(words.run, words.other, as_json=words.json, html=words.html)


def watch(words: _Words) -> int:
    """Where a run stands, live, in a terminal."""
    from elastic.report.live import watch

    with _looking():
        return watch(words.run, once=words.once)


def serve(words: _Words) -> int:
    """The page of a run, live, in a browser; at 127.0.0.1:8080, unless told otherwise."""
    from elastic.report.live import serve

    with _looking():
        return serve(words.run, words.listen)


def runs(words: _Words) -> int:
    """All runs below a folder or URL [runs]."""
    from elastic.report.runs import list_runs
    from elastic.report.tables import runs_table, show

    with _looking():
        found = list_runs(words.folder)
    if words.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show(runs_table(found))
    return EXIT_COMPLETE


def clean(words: _Words) -> int:
    """Remove what a finished run needs no more."""
    from elastic.report.clean import Leftover, clean

    def agrees(files: Sequence[Leftover]) -> bool:
        if words.yes or words.json:
            return bool(words.yes)
        for each in files:
            print(printable(f"{each.size_bytes:>14,} bytes  {each.name}  ({each.what})"))
        total = sum(each.size_bytes for each in files)
        print(f"remove these {len(files)} files, {total:,} bytes in all? [y/N] ", end="", flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    if not words.yes and not words.json and not (sys.stdin and sys.stdin.isatty()):
        raise UsageError(
            "expected a terminal to ask on, found none; give --yes, or --json for the list alone"
        )
    with _looking():
        found = clean(RunDir.parse(words.run), SystemClock(), agrees=agrees)
    if words.json:
        print(json.dumps(asdict(found), indent=2))
    elif not found.files:
        print(printable(f"{found.run}: a finished run with nothing that it does not need"))
    else:
        gone = f"{found.removed} of {len(found.files)} files were removed"
        print(printable(f"{found.run}: {gone}; checkpoints, metrics, events and the newest logs stay"))
    return EXIT_COMPLETE


def export(words: _Words) -> int:
    """The weights of a committed step, as .safetensors, .pth or .pt [--entry model]."""
    from elastic.report.export import export

    with _looking():
        said = export(words.state, words.file, words.entry, SystemClock(), overwrite=words.overwrite)
    print(printable(said))
    return EXIT_COMPLETE


def completion(words: _Words) -> int:
    """A script that has the shell complete these: eval "$(elastic-train completion bash)"."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["elastic-train"], shell=words.shell))
    return EXIT_COMPLETE
