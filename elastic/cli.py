"""Every call of `elastic-train` ends with a documented exit code, and explains a mistake.

A mistake of the caller never shows a traceback. Training itself is the agent's, which is imported
only when there is a recipe to run.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from elastic.commands import command_parser, run_command, usage_of
from elastic.config import environment
from elastic.config.options import OPTIONS_HELP, asks_for, parse, training_parser
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, ElasticError, UsageError
from elastic.system import command_end, supervisor
from elastic.system.leave_deadline import LeavePage
from elastic.system.processes import die_with_parent
from elastic.system.untrusted import printable

_HELP = """\
Train a PyTorch recipe on machines that may come, go and fail.
The same recipe, arguments and seed give the same weights, bit for bit, whatever happens on the way.

  elastic-train RECIPE [options] [-- recipe arguments]   train; the same command resumes
{commands}

RECIPE is a Python script; RUN is a run directory, or the URL of one. elastic-train COMMAND --help
says more of a command.

examples:
  elastic-train recipes/barlow.py                        one node; the run is runs/barlow
  elastic-train recipes/barlow.py --run-dir /shared/b --min-nodes 2 --max-nodes 4 -- --epochs 100
                                                         the same command on each of the nodes,
                                                         which share that folder and nothing else
  elastic-train report runs/barlow                       what happened

{options}

exit codes:
  0   the run is complete (check, diff: no difference was found; verify: no damage)
  1   training failed; the traceback of the worker that failed first is printed last
      or it was interrupted before its last step was saved; the last line says which step is
      (check: runs of the recipe differ or fail; diff: the runs differ; verify: there is damage)
  2   the command, the recipe or the run directory is not as expected, or cannot be read
  75  interrupted, and no step of this command is lost: the same command resumes
  76  states of the run exist, but none loads: elastic-train verify RUN reads the checkpoints
  130 Ctrl-C before the node was ready to train; nothing is lost
      (check: Ctrl-C ended it; SIGTERM or SIGHUP: 75)

{version}"""


def command() -> NoReturn:
    """Run `elastic-train` as a process.

    It exits with `os._exit`: interpreter shutdown would spend half a second or more on taking torch
    down.
    """
    command_end.end_at_once()
    command_end.open_closed_streams()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader is gone, or the disk is full
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except ElasticError as error:
        command_end.print_if_read(f"elastic-train: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        command_end.print_if_read(command_end.SENTENCE, file=sys.stderr)
        return command_end.code_of(error)
    except BrokenPipeError:
        # `report RUN | head` has closed its end. The interpreter flushes stdout once more at exit,
        # and would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _dispatch(words: list[str]) -> int:
    whole, commands = command_parser()
    if (line := environment.completed_line()) is not None:
        _complete(line, whole, commands)
    if words and words[0] in commands:
        return run_command(commands[words[0]], words[1:])
    if asks_for(words, "-h", "--help"):
        told = "\n".join(f"  {usage_of(each)}\n      {each.description}" for each in commands.values())
        print(_HELP.format(commands=told, options=OPTIONS_HELP, version=_version()))
        return EXIT_COMPLETE
    if asks_for(words, "--version"):
        print(_version())
        return EXIT_COMPLETE
    return _train(words, commands)


def _complete(line: str, whole: argparse.ArgumentParser, commands: Iterable[str]) -> None:
    """Tell the shell how the words of `line` may go on, and end; without an answer of ours, the
    shell completes names of files.
    """
    import argcomplete

    words = line.split()[1:]
    is_first = not words or (len(words) == 1 and not line[-1].isspace())
    is_command = not "".join(words).startswith("-") if is_first else words[0] in commands
    argcomplete.autocomplete(whole if is_command else training_parser())


def _version() -> str:
    import importlib.metadata

    return f"elastic-train {importlib.metadata.version('elastic-train')}"


def _train(words: list[str], commands: Iterable[str]) -> int:
    if (check := environment.read().check) is not None:
        die_with_parent(check.pid)
    options = parse(words)
    if not os.path.isfile(options.recipe):  # noqa: PTH113 - Path.is_file raises for a long name
        raise UsageError(
            f"expected a recipe file or one of the commands {', '.join(commands)}, found {options.recipe!r}, which is not a file"
        )
    page = LeavePage(options.grace_s)
    if words == sys.argv[1:]:  # a test or a program that calls `main` must not be replaced
        command_end.end_at_once_by((signal.SIGTERM, *options.drain_signals))
        supervisor.supervise(page, options.drain_signals)
    from elastic.agent import preflight
    from elastic.agent.worker_process import Spawner
    from elastic.report.monitors import open_monitors

    modules = preflight.imported_first(Path(options.recipe))
    preflight.check_command(options)
    environment.pin_threads()
    environment.set_up_malloc()
    if said := environment.fix_hashing():
        print(said, flush=True)
    with contextlib.ExitStack() as opened:
        monitors = open_monitors(options, opened)
        # torch takes seconds to import. Mistakes in the command are refused before that, and the
        # fork server imports it, and what the recipe names, while the agent starts.
        spawner = Spawner(partial(print, flush=True), modules)
        opened.enter_context(contextlib.closing(spawner))
        from elastic.agent.launch import launch

        command_end.raise_from_here()
        code = launch(options, spawner, monitors, page)
    command_end.print_if_read(file=sys.stdout)  # a closed terminal does not change how the training ended
    return code


if __name__ == "__main__":
    command()
