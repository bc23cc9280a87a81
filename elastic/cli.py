"""Every way to call `elastic-train` ends in one of the documented exit codes, and a mistake of the caller in a sentence, not a traceback.

It does not promise anything about training itself: that is the agent's, which is imported only when a recipe is to run.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from elastic.config import environment
from elastic.config.options import COMMANDS, Inspection, asks_for, options_help, parse, parse_inspection
from elastic.config.run_dir import RunDir
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, ElasticError, UsageError
from elastic.system.clock import SystemClock
from elastic.system.untrusted import printable

EXIT_CTRL_C = 130  # what a shell reports for a program that SIGINT ended

_HELP = """\
Train a PyTorch recipe on nodes that may come, go and fail. The same recipe, arguments and seed give the same weights.

  elastic-train RECIPE [options] [-- recipe arguments]      train; the same command resumes
  elastic-train report RUN [--json]                         what a run did: steps, losses of time, recoveries
  elastic-train status RUN [--json]                         where a run stands now
  elastic-train verify RUN [--json]                         read every checkpoint and list the damage
  elastic-train diff   RUN RUN [--json]                     the first step at which two runs differ

examples:
  elastic-train recipes/barlow.py                           one node, runs/barlow
  elastic-train recipes/barlow.py --run-dir /shared/b --min-nodes 2 --max-nodes 4 -- --epochs 100
                                                            the same command on every node that shares the folder
  elastic-train report runs/barlow

{options}

what survives what:
  a worker or a node dies      the others start a new generation and resume from the newest checkpoint
  SIGTERM, Ctrl-C              all finish the same step and commit a checkpoint within --grace: exit 75, 0 steps lost
  everything dies              the same command resumes; the steps since the last checkpoint are done again

exit codes:
  0   complete (diff: the same; verify: no damage)
  1   training failed; the first failing worker's traceback is printed last (diff: different; verify: damage)
  2   the command line, the recipe or the run directory is not as expected
  75  interrupted, checkpoint committed: the same command resumes
  76  checkpoints were committed but none loads: elastic-train verify RUN lists why

{version}"""


def command() -> NoReturn:
    """`elastic-train` as a process, which ends without the interpreter's last part: there torch takes back what it made, for half a second and more, and for nobody."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more, or there is no room
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except ElasticError as error:
        print(f"elastic-train: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_CTRL_C
    except BrokenPipeError:
        # `report RUN | head` closed its end; the interpreter would complain once more when it flushes stdout on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _dispatch(words: list[str]) -> int:
    if asks_for(words, "-h", "--help"):
        print(_HELP.format(options=options_help(), version=_version()))
        return EXIT_COMPLETE
    if asks_for(words, "--version"):
        print(_version())
        return EXIT_COMPLETE
    if words and words[0] in COMMANDS:
        return _inspect(parse_inspection(words))
    return _train(words)


def _version() -> str:
    return f"elastic-train {importlib.metadata.version('elastic-train')}"


def _train(words: list[str]) -> int:
    options = parse(words)
    if not Path(options.recipe).is_file():
        commands = ", ".join(COMMANDS)
        raise UsageError(
            f"expected a recipe file or one of the commands {commands}, found {options.recipe!r}, which is no file"
        )
    from elastic.agent import preflight
    from elastic.agent.workers.fork_server_client import ForkServerClient
    from elastic.agent.workers.spawner import Spawner
    from elastic.worker.fork_server import become_fork_server

    recipe = Path(options.recipe)
    preflight.uses_library(recipe)  # what is not Python is refused before it is read for its imports
    preflight.check_command(options)
    environment.pin_threads()
    if words == sys.argv[1:]:  # this process is that command, and not a caller of `main`
        environment.ask_for_large_pages()
    # Only here and behind it: torch takes seconds to import, and the other commands do without it.
    with Spawner(
        recipe, _say, lambda recipe: ForkServerClient.fork_from_agent(recipe, become_fork_server)
    ) as spawner:
        from elastic.agent.launch import launch

        return launch(options, spawner)


def _say(text: str) -> None:
    print(text, flush=True)


def _inspect(wanted: Inspection) -> int:
    runs = [RunDir.parse(text) for text in wanted.runs]
    match wanted.command:
        case "verify":
            return _verify(wanted, runs[0])
        case _:
            pass
    from elastic.report.download import readable
    from elastic.storage.remote import check_url

    for run in runs:
        check_url(run.url)
    with contextlib.ExitStack() as stack:
        there = [stack.enter_context(readable(run)) for run in runs]
        match wanted.command:
            case "report":
                return _report(wanted, there[0])
            case "status":
                return _status(wanted, there[0])
            case _:
                return _diff(wanted, *there)


def _report(wanted: Inspection, run: RunDir) -> int:
    from elastic.observe.log import read_events
    from elastic.observe.metrics import read
    from elastic.report.report import summarise
    from elastic.report.tables import report_tables

    report = summarise(read_events(run.events), read(run.metrics))
    _show(wanted, report, report_tables(run.url, report))
    return EXIT_COMPLETE


def _status(wanted: Inspection, run: RunDir) -> int:
    from elastic.observe.log import read_events
    from elastic.observe.metrics import newest
    from elastic.rendezvous.backends.heartbeat_ages import heartbeat_ages_s
    from elastic.report.status import status
    from elastic.report.tables import status_tables

    now = SystemClock().wall()
    value = status(
        read_events(run.events), newest(run.metrics), heartbeat_ages_s(run.rendezvous_url, now=now), now
    )
    _show(wanted, value, status_tables(run.url, value))
    return EXIT_COMPLETE


def _diff(wanted: Inspection, a: RunDir, b: RunDir) -> int:
    from elastic.observe.log import read_events
    from elastic.observe.metrics import read
    from elastic.report.diff import compare
    from elastic.report.report import summarise
    from elastic.report.tables import diff_text

    lines_a, lines_b = read(a.metrics), read(b.metrics)
    report_a = summarise(read_events(a.events), lines_a)
    found = compare(report_a, lines_a, summarise(read_events(b.events), lines_b), lines_b)
    _show(wanted, found, diff_text(found))
    return EXIT_COMPLETE if found.same else EXIT_FAILED


def _verify(wanted: Inspection, run: RunDir) -> int:
    from elastic.report.tables import verify_text
    from elastic.report.verify import verify_run

    found = verify_run(run, SystemClock())
    _show(wanted, found, verify_text(run.url, found))
    return EXIT_FAILED if found.damage else EXIT_COMPLETE


def _show(wanted: Inspection, value: Any, for_people: Any) -> None:
    """value: the frozen result of a command, whose fields are the keys of its JSON."""
    from rich.console import Console

    if wanted.as_json:
        print(json.dumps(dataclasses.asdict(value), indent=2))
    else:
        Console(highlight=False).print(for_people, soft_wrap=True)


if __name__ == "__main__":
    command()
