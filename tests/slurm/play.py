"""`make slurm`: start a real Slurm here, run every scenario with its jobs, and print one table.

    python tests/slurm/play.py [NAME ...]    only these scenarios
    python tests/slurm/play.py --list

Exit 1: a run did not survive, or its weights are not those of an undisturbed run. Its files are
kept, and their folder is printed. Exit 2: Slurm cannot be had here; the reason is printed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FrameType

# Where `run_records` lies: started by its path, this script finds only its own folder by itself.
sys.path.append(str(Path(__file__).parents[1] / "support"))

from job_run import TINY, JobRun, report_of
from packages import NoSlurm
from rich.console import Console
from rich.table import Table
from scenarios import SCENARIOS
from slurm import slurm

from elastic.system.processes import adopt_orphans, kill_children, signal_with_parent

UNDISTURBED_S = 240.0
LANES = 2
INTERRUPTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Scenario = Callable[[JobRun], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """problem: empty for a run that survived. starts: of agents."""

    name: str
    took_s: float
    problem: str = ""
    starts: int = 0
    digest: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    wanted = parser.parse_args()
    scenarios = {scenario.__name__: scenario for scenario in SCENARIOS}
    if unknown := set(wanted.names) - set(scenarios):
        parser.error(f"expected names of scenarios (--list), found {', '.join(sorted(unknown))}")
    if wanted.list:
        for name, scenario in scenarios.items():
            print(f"{name:16}{scenario.__doc__}")
        return 0
    return _watched(lambda: _play_in_folder([scenarios[name] for name in wanted.names or scenarios]))


def _watched(play: Callable[[], int]) -> int:
    """The exit code of `play` in a child. Either tidies up where SIGKILL ends the other."""
    adopt_orphans()
    parent, child = os.getpid(), os.fork()
    if child:
        for number in INTERRUPTS:
            signal.signal(number, partial(_pass_on, child))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        kill_children()
        return code if code >= 0 else 128 - code
    for number in INTERRUPTS:
        signal.signal(number, _interrupt)
    signal_with_parent(parent, signal.SIGTERM)
    code = play()
    sys.stdout.flush()
    os._exit(code)


def _play_in_folder(scenarios: list[Scenario]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="elastic-slurm-"))
    try:
        code = _play(scenarios, folder)
    except NoSlurm as reason:
        print(f"\nNOTHING WAS TESTED: {reason}\n", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; all jobs and daemons are ended", file=sys.stderr)
        code = 130
    if code == 1:
        print(f"what the failed runs left is in {folder}")
    else:
        shutil.rmtree(folder)
    return code


def _play(scenarios: list[Scenario], folder: Path) -> int:
    """Raises NoSlurm."""
    began_s = time.monotonic()
    results: list[CaseResult] = []
    with _undisturbed(folder) as digest, slurm(folder / "slurm") as found:
        print(f"Slurm runs after {time.monotonic() - began_s:.0f} s", flush=True)

        waiting = deque(scenarios)

        def play() -> None:
            while True:
                try:
                    scenario = waiting.popleft()
                except IndexError:
                    return
                result = _run(scenario, JobRun(found, folder / scenario.__name__), digest)
                results.append(result)
                print(f"{result.name}: {result.problem or 'survived'}, {result.took_s:.0f} s", flush=True)

        # Most of a scenario is waiting, for Slurm and for a node to start.
        lanes = [threading.Thread(target=play, daemon=True) for _ in range(LANES)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    Console().print(_table(results))
    print(f"{len(results)} scenarios in {time.monotonic() - began_s:.0f} s")
    return 0 if len(results) == len(scenarios) and not any(each.problem for each in results) else 1


@contextmanager
def _undisturbed(folder: Path) -> Iterator[Callable[[], str]]:
    """The digest of the recipe without Slurm and without faults, trained beside what follows."""
    url = folder / "undisturbed"
    words = [sys.executable, "-m", "elastic.cli", str(TINY), "--run-dir", str(url)]
    with (folder / "undisturbed.out").open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)

    @cache
    def digest() -> str:
        if code := process.wait(UNDISTURBED_S):
            raise RuntimeError(f"expected the recipe to train without Slurm, found exit code {code}")
        return str(report_of(url)["final_digest"])

    try:
        yield digest
    finally:
        process.kill()
        process.wait()


def _run(scenario: Scenario, run: JobRun, digest: Callable[[], str]) -> CaseResult:
    began_s, problem, report = time.monotonic(), "", {}
    try:
        scenario(run)
        report = run.report()
        if report["final_digest"] != digest():
            problem = f"expected the undisturbed digest {digest()}, found {report['final_digest']}"
        elif report["lost_steps"]:
            problem = f"expected no lost step, found {report['lost_steps']}"
    except Exception as error:  # else the thread would end, and the scenario would not be missed
        problem = f"{type(error).__name__}: {error}"
    for job in run.jobs if problem else []:
        with suppress(RuntimeError):
            run.slurm.call("scancel", "--signal=KILL", "--full", job)
            run.slurm.call("scancel", job)
    return CaseResult(
        name=scenario.__name__,
        took_s=time.monotonic() - began_s,
        problem=problem,
        starts=len(report.get("scheduled", [])),
        digest=report.get("final_digest") or "",
    )


def _table(results: list[CaseResult]) -> Table:
    table = Table(title="What survives what under Slurm")
    table.add_column("case", no_wrap=True)
    table.add_column("survived")
    for name in ("seconds", "starts of agents"):
        table.add_column(name, justify="right")
    table.add_column("digest", no_wrap=True)
    for each in results:
        row = (
            each.name,
            "no" if each.problem else "yes",
            f"{each.took_s:.0f}",
            str(each.starts),
            each.digest[:16],
        )
        table.add_row(*row)
    return table


def _pass_on(child: int, number: int, _frame: FrameType | None) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End by KeyboardInterrupt, which ends Slurm; ignore further signals meanwhile."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
