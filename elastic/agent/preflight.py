"""Before anything is written or anybody is disturbed, the recipe itself says what it is going to do, or why it cannot.

The recipe runs in a process of its own up to `elastic.start`, which writes down the run's identity and ends it. So a mistake in the command, a recipe that
does not import, or a broken machine ends here, with exit 2, and a node with other arguments never gets as far as joining.
A script that does not use this library is not run twice: it is only looked at for the import.
"""

import ast
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from elastic.agent.workers.process import Process, ProcessStart, kill_session, spawn, wait_any_exit
from elastic.config import environment, identity
from elastic.config.identity import Identity
from elastic.errors import EXIT_COMPLETE, UsageError
from elastic.system.clock import SystemClock

PREFLIGHT_S = 600.0
_CLOCK = SystemClock()
_STDERR = 2


def uses_library(recipe: Path) -> bool:
    """Whether the script imports `elastic` anywhere in its own text. Raises UsageError when it is not Python."""
    try:
        tree = ast.parse(recipe.read_bytes(), filename=str(recipe))
    except FileNotFoundError as error:
        raise UsageError(
            f"expected a recipe, found no file {recipe}; give the path of a Python script"
        ) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"expected a Python script in {recipe}, found something else: {error}") from error
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        if any(name.split(".")[0] == "elastic" for name in names):
            return True
    return False


def ask(
    recipe: Path, arguments: tuple[str, ...], start: Callable[[ProcessStart], Process] = spawn
) -> Identity:
    """The run that the recipe declares.

    Raises UsageError when it fails before it declares one; SystemExit(0) when it ends well without, as `-- --help` does.
    """
    with tempfile.TemporaryDirectory(prefix="elastic-preflight-") as folder, tempfile.TemporaryFile() as out:
        answer = Path(folder) / "run.json"
        env = os.environ | {environment.PREFLIGHT: str(answer)}
        sys.stderr.flush()
        child = start(ProcessStart(words=(str(recipe), *arguments), env=env, out=out.fileno(), err=_STDERR))
        try:
            code = _end(child)
        finally:
            kill_session(child)
        if code is None:
            raise UsageError(
                f"{recipe} did not reach elastic.start within {PREFLIGHT_S:.0f} s; call it before loading data"
            )
        if answer.exists():
            return identity.parse(answer.read_bytes())
        out.seek(0)
        sys.stdout.buffer.write(out.read())
        sys.stdout.flush()
        if code == EXIT_COMPLETE:
            raise SystemExit(EXIT_COMPLETE)
        raise UsageError(
            f"{recipe} ended with exit code {code} before it called elastic.start; its words are above"
        )


def _end(child: Process) -> int | None:
    deadline = _CLOCK.monotonic() + PREFLIGHT_S
    while (code := child.poll()) is None and (left_s := deadline - _CLOCK.monotonic()) > 0:
        wait_any_exit([child], left_s)
    return code
