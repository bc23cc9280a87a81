"""A command's standard output, or an error with its standard error."""

import os
import subprocess


def command(*words: str, check: bool = True, env: dict[str, str] | None = None) -> str:
    """Raises RuntimeError if it fails and `check`, and if there is no such command."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env=os.environ | (env or {})
        )
    except OSError as error:
        raise RuntimeError(f"{words[0]}: {error}") from error
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr.strip()}")
    return done.stdout.strip()


def docker(*words: str, check: bool = True) -> str:
    """The classic builder needs no plugin, and our Dockerfiles need no other."""
    return command("docker", *words, check=check, env={"DOCKER_BUILDKIT": "0"})
