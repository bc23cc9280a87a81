"""`make cluster`: every scenario on containers, one table, exit 1 if one of them was not survived or went another way than written.

    python tests/cluster/run.py [NAME ...]        some scenarios only
    python tests/cluster/run.py --update          write what happened into the files, for a person to review
    python tests/cluster/run.py --list

Exit 2: no container can run here, and why. What a failed scenario left behind is kept, and named.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cluster import Cluster
from engine import NoEngine, engine
from image import ROOT, node_image
from oracle import Evidence, Verdict, history, judge
from play import SAVES, TINY, Play, WentWrong, evidence
from rich.console import Console
from rich.table import Table
from scenario import Scenario, parse, rewritten

from elastic.run_dir import RunDir

SCENARIOS = ROOT / "tests" / "scenarios" / "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`verdict` is None where the scenario could not be played to its end; `kept` is the folder of what is left of a failure."""

    scenario: Scenario
    verdict: Verdict | None
    happened: list[str]
    complaints: list[str]
    took_s: float
    kept: Path | None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--list", action="store_true")
    wanted = parser.parse_args()
    scenarios = [parse(path.stem, path.read_text()) for path in sorted(SCENARIOS.glob("*.txt"))]
    if unknown := set(wanted.names) - {scenario.name for scenario in scenarios}:
        parser.error(f"expected names of scenarios (--list), found {', '.join(sorted(unknown))}")
    chosen = [scenario for scenario in scenarios if not wanted.names or scenario.name in wanted.names]
    if wanted.list:
        print("\n".join(f"{scenario.name:24}{scenario.title}" for scenario in chosen))
        return 0
    # As Ctrl-C: what was started is removed on the way out.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with engine() as version:
            print(f"Docker engine {version}; {len(chosen)} scenarios", flush=True)
            return _play_all(chosen, update=wanted.update)
    except NoEngine as reason:
        print(f"\nNO CONTAINER CAN RUN HERE, NOTHING WAS TESTED: {reason}\n", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; every container is removed", file=sys.stderr)
        return 130


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _play_all(scenarios: list[Scenario], *, update: bool) -> int:
    began_s = time.monotonic()
    image = node_image()
    undisturbed = _undisturbed()
    outcomes = []
    for scenario in scenarios:
        outcome = _play(scenario, image, undisturbed, update=update)
        outcomes.append(outcome)
        print(
            f"{scenario.name}: {'survived' if not outcome.complaints else 'FAILED'}, {outcome.took_s:.0f} s",
            flush=True,
        )
        for complaint in outcome.complaints:
            print(f"    {complaint}", flush=True)
        if outcome.kept is not None:
            print(f"    what it left is in {outcome.kept}", flush=True)
    Console().print(_table(outcomes))
    print(f"{len(outcomes)} scenarios in {time.monotonic() - began_s:.0f} s")
    return 1 if any(outcome.complaints for outcome in outcomes) else 0


def _undisturbed() -> Evidence:
    """One worker on this machine, outside of any container, from start to end."""
    folder = Path(tempfile.mkdtemp(prefix="elastic-undisturbed-"))
    words = [sys.executable, "-m", "elastic.cli", str(TINY), "--run-dir", str(folder / "run"), *SAVES]
    try:
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return evidence(RunDir.parse(str(folder / "run")))
    finally:
        shutil.rmtree(folder)


def _play(scenario: Scenario, image: str, undisturbed: Evidence, *, update: bool) -> Outcome:
    began_s = time.monotonic()
    verdict, happened, kept = None, [], None
    with Cluster(image) as cluster:
        try:
            found = Play(scenario, cluster).perform()
            verdict, happened = judge(found, undisturbed, scenario.within_s), history(found.events)
            complaints = list(verdict.complaints)
        except (WentWrong, TimeoutError, RuntimeError) as error:
            complaints = [str(error)]
        if verdict is not None and happened != list(scenario.expected):
            if update:
                path = SCENARIOS / f"{scenario.name}.txt"
                path.write_text(rewritten(path.read_text(), happened))
            else:
                complaints += [
                    "expected " + " | ".join(scenario.expected),
                    "found    " + " | ".join(happened),
                ]
        if complaints:
            kept = _keep(scenario.name, cluster)
    return Outcome(
        scenario=scenario,
        verdict=verdict,
        happened=happened,
        complaints=complaints,
        took_s=time.monotonic() - began_s,
        kept=kept,
    )


def _keep(name: str, cluster: Cluster) -> Path:
    """The run, and what every node printed."""
    folder = Path(tempfile.mkdtemp(prefix=f"elastic-failed-{name}-"))
    shutil.copytree(cluster.shared, folder, dirs_exist_ok=True)
    for node in cluster.nodes:
        (folder / f"{node}.log").write_text(cluster.log(node, lines=2000))
    return folder


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="What survives what")
    table.add_column("case", no_wrap=True)
    table.add_column("survived")
    for name in ("seconds to next step", "steps lost"):
        table.add_column(name, justify="right")
    table.add_column("digest", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            outcome.scenario.name, "no" if outcome.complaints else "yes", *_measured(outcome.verdict)
        )
    return table


def _measured(verdict: Verdict | None) -> tuple[str, str, str]:
    if verdict is None:
        return "–", "–", "–"  # noqa: RUF001 - the dash of the table
    waited = "–" if verdict.next_step_s is None else f"{verdict.next_step_s:.2f}"  # noqa: RUF001 - as above
    return waited, str(verdict.lost_steps), (verdict.digest or "none")[:16]


if __name__ == "__main__":
    sys.exit(main())
