"""`make slurm`: start a real Slurm, run every scenario with its jobs, and print a line for each.

    python tests/slurm/play.py [NAME ...]    only these scenarios

Exit 1: a run did not survive, or its weights are not those of an undisturbed run. Its files are
kept, and their folder is printed. Exit 2: Slurm cannot be had here; the reason is printed.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

# Started by its path, this script finds only its own folder by itself.
sys.path += [str(Path(__file__).parents[1] / name) for name in ("support", "cluster")]

from job_run import TINY, JobRun
from oracle import Evidence, evidence, judge, undisturbed
from scenarios import SCENARIOS
from slurm import Slurm, slurm
from supervised import keep, main

from elastic.config.run_dir import RunDir

LANES = 2

Scenario = Callable[[JobRun], None]


def _play(_run: str, scenarios: list[Scenario]) -> int:
    folder, began_s = Path(tempfile.mkdtemp(prefix="slurm-")), time.monotonic()
    found = slurm(folder / "slurm")
    expected = undisturbed(TINY, folder / "undisturbed")
    print(f"Slurm runs after {time.monotonic() - began_s:.0f} s", flush=True)
    # Most of a scenario is waiting, for Slurm and for a node to start.
    with ThreadPoolExecutor(LANES) as lanes:
        problems = list(lanes.map(lambda scenario: _problem(scenario, found, folder, expected), scenarios))
    print(f"{len(problems)} scenarios in {time.monotonic() - began_s:.0f} s")
    if any(problems):
        print(f"what the failed runs left is in {keep('slurm', folder)}")
    return 1 if any(problems) else 0


def _problem(scenario: Scenario, found: Slurm, folder: Path, expected: Evidence) -> str:
    """Play a scenario, and print how it went; empty where its run survived."""
    run, began_s, problem, digest = JobRun(found, folder / scenario.__name__), time.monotonic(), "", None
    try:
        scenario(run)
        verdict = judge(evidence(RunDir.parse(str(run.url)), run.samples), expected, math.inf)
        digest, lost = verdict.digest, verdict.lost_steps
        problem = "; ".join([*verdict.problems, *([f"{lost} steps were lost"] if lost else [])])
    except Exception as error:  # else the other scenarios would not be played
        problem = f"{type(error).__name__}: {error}"
    for job in run.jobs if problem else []:
        with suppress(RuntimeError):
            found.call("scancel", "--signal=KILL", "--full", job)
            found.call("scancel", job)
    took_s, starts = time.monotonic() - began_s, len(run.hosts())
    said = f"{scenario.__name__:16}{problem or 'survived'} in {took_s:.0f} s; {starts} starts of agents"
    print(f"{said}, digest {(digest or 'none')[:16]}", flush=True)
    return problem


if __name__ == "__main__":
    sys.exit(main(__doc__, {scenario.__name__: scenario for scenario in SCENARIOS}, _play))
