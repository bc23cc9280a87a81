"""Before anything is written or anybody is disturbed, the recipe itself says what it is going to do, or why it cannot.

The recipe runs in a process of its own up to `elastic.start`, which writes down the run's identity and ends it. So a mistake in the command, a recipe that
does not import, or a broken machine ends here, with exit 2, and a node with other arguments never gets as far as joining.
A script that does not use this library is not run twice: it is only looked at for the import.
"""

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from elastic import identity, launch_env
from elastic.errors import EXIT_COMPLETE, UsageError
from elastic.identity import Identity

PREFLIGHT_S = 600.0


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


def ask(recipe: Path, arguments: tuple[str, ...]) -> Identity:
    """The run that the recipe declares.

    Raises UsageError when it fails before it declares one; SystemExit(0) when it ends well without, as `-- --help` does.
    """
    with tempfile.TemporaryDirectory(prefix="elastic-preflight-") as folder:
        answer = Path(folder) / "run.json"
        try:
            process = subprocess.run(
                [sys.executable, "-u", "-m", "elastic.train.worker", str(recipe), *arguments],
                env=os.environ | {launch_env.PREFLIGHT: str(answer)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=PREFLIGHT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UsageError(
                f"{recipe} did not reach elastic.start within {PREFLIGHT_S:.0f} s; call it before loading data"
            ) from error
        if answer.exists():
            return identity.parse(answer.read_bytes())
        sys.stdout.buffer.write(process.stdout)
        sys.stdout.flush()
        if process.returncode == EXIT_COMPLETE:
            raise SystemExit(EXIT_COMPLETE)
        raise UsageError(
            f"{recipe} ended with exit code {process.returncode} before it called elastic.start; its words are above"
        )
