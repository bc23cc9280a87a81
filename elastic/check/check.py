"""A recipe is tried as a user would try it: by the command itself, again and again.

Each run is a process of its own, with a run directory in a temporary folder, and each one breaks
something else (plan.py). Nothing else is written, unless the recipe writes elsewhere than to
`run.path`. What is compared was written by the workers (train/trace.py).
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.check.compare import CAUSES, first_difference, unsteady_values
from elastic.check.plan import (
    AGAIN,
    CALM,
    CALM_SECONDS,
    GRADIENT,
    GRADIENT_LIMIT,
    LEAST_STEPS,
    Launch,
    launches,
)
from elastic.config import environment
from elastic.config.environment import CheckRequest
from elastic.config.options import CheckOptions
from elastic.errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_USAGE, ElasticError, UsageError
from elastic.observe.log import parse_lines
from elastic.system.clock import SystemClock
from elastic.system.trace_line import FirstGradient, TraceLine
from elastic.system.untrusted import decode

AT_ONCE = 2  # launches; more would only wait for each other's processors
LAUNCH_LIMIT_S = 900.0
LAST_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the steps of one launch showed.

    step, entry: of the first difference from the calm run. failure: how the launch ended, where it
    did not end as it should. note: what a proof shows or leaves open that found no difference.
    """

    proof: str
    workers: int
    same: bool
    seconds: float
    step: int | None = None
    entry: str | None = None
    failure: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The fields are the keys of `check --json`.

    steps: how many steps were compared, the first ones, of steps_of_run. ignored: names of logged
    values that differ between two equal commands. cause: what usually makes the first proof fail
    that failed.
    """

    recipe: str
    same: bool
    steps: int
    steps_of_run: int
    proofs: list[Proof]
    ignored: list[str]
    cause: str | None


class RecipeFailed(ElasticError):  # noqa: N818
    """The calm run did not come through: there is nothing to compare."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    code: int
    output: str
    lines: list[TraceLine]
    seconds: float

    @property
    def last_words(self) -> str:
        return "\n".join(self.output.strip().splitlines()[-LAST_LINES:])


def check(options: CheckOptions) -> Checked:
    """Raises UsageError or RecipeFailed where the calm run by one worker does not come through."""
    with tempfile.TemporaryDirectory(prefix="elastic-check-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        least, seconds = (LEAST_STEPS, CALM_SECONDS) if options.steps is None else (options.steps, 0.0)
        calm = _run(options, root / "calm", Launch(proof=CALM, workers=1), least, seconds)
        if calm.code == EXIT_USAGE:
            raise UsageError(calm.last_words.removeprefix("elastic-train: "))
        if calm.code != EXIT_COMPLETE or not calm.lines:
            ended = f"ended with exit code {calm.code} after {len(calm.lines)} steps"
            code = calm.code if calm.code > 0 else EXIT_FAILED
            raise RecipeFailed(
                f"{calm.last_words}\nthe calm run by one worker {ended}; nothing was compared", code
            )
        return _prove(options, root, calm.lines)


def _prove(options: CheckOptions, root: Path, calm: list[TraceLine]) -> Checked:
    expected = {line.step: line for line in calm}
    steps, last = max(expected), calm[-1]
    chains = launches(steps, last.shards)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = pool.map(
            lambda job: _run_chain(options, root / str(job[0]), job[1], steps), enumerate(chains)
        )
        found = [each for chain in ended for each in chain]
    again = [line for launch, end in found if launch.proof == AGAIN for line in end.lines]
    ignored = unsteady_values(expected, again)
    proofs = [gradient_proof(calm[0].gradient)]
    for launch, end in found:
        difference = first_difference(expected, end.lines, ignored)
        failure = None
        if end.code not in launch.ends:
            failure = f"exit code {end.code} instead of {launch.ends[0]}:\n{end.last_words}"
        proofs.append(
            Proof(
                proof=launch.proof,
                workers=launch.workers,
                same=difference is None and failure is None,
                seconds=end.seconds,
                step=None if difference is None else difference.step,
                entry=None if difference is None else difference.entry,
                failure=failure,
            )
        )
    first_bad = next((each for each in proofs if not each.same), None)
    return Checked(
        recipe=options.recipe,
        same=first_bad is None,
        steps=steps,
        steps_of_run=last.steps,
        proofs=proofs,
        ignored=sorted(ignored),
        cause=None if first_bad is None else CAUSES[first_bad.proof],
    )


def gradient_proof(found: FirstGradient | None) -> Proof:
    """What the first gradient of the calm run shows, which was compared beside it."""
    if found is None or found.difference is None:
        obstacle = "the run did not begin at step 1" if found is None else found.obstacle
        return Proof(proof=GRADIENT, workers=1, same=True, seconds=0.0, note=f"not compared: {obstacle}")
    note = f"{found.difference:.1e} of its norm from that of the whole batch"
    if found.difference <= GRADIENT_LIMIT:
        return Proof(proof=GRADIENT, workers=1, same=True, seconds=0.0, note=note)
    return Proof(proof=GRADIENT, workers=1, same=False, seconds=0.0, step=1, entry=found.parameter, note=note)


def _run_chain(
    options: CheckOptions, folder: Path, chain: Sequence[Launch], steps: int
) -> list[tuple[Launch, _Ended]]:
    """Until a launch does not end as it should: what follows would resume something else."""
    found = []
    for launch in chain:
        found.append((launch, _run(options, folder, launch, steps, 0.0)))
        if found[-1][1].code not in launch.ends:
            break
    return found


def _run(options: CheckOptions, folder: Path, launch: Launch, least_steps: int, seconds: float) -> _Ended:
    clock = SystemClock()
    began_s = clock.monotonic()
    trace = folder.with_suffix(f".{launch.workers}.trace")
    request = CheckRequest(
        trace=str(trace),
        least_steps=least_steps,
        seconds=seconds,
        leave_at=launch.leave_at,
        gradient=launch.proof == CALM,
    )
    command = [sys.executable, "-m", "elastic.cli", options.recipe, "--run-dir", str(folder)]
    command += ["--nproc-per-node", str(launch.workers), *launch.options, "--", *options.recipe_args]
    env = environment.variables() | request.to_env()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(LAUNCH_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    data = b""
    with suppress(FileNotFoundError):
        data = trace.read_bytes()
    lines = list(parse_lines(data.splitlines(), _parsed))
    return _Ended(code=code, output=text, lines=lines, seconds=clock.monotonic() - began_s)


def _parsed(record: object) -> TraceLine:
    return decode(TraceLine, record, what="a line of a trace")
