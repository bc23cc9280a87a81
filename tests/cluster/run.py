"""`make cluster`: run every scenario on containers, and print a line for each.

    python tests/cluster/run.py [NAME ...]    only these scenarios
    python tests/cluster/run.py --quick       one of each kind: what must pass before a merge
    python tests/cluster/run.py --update      write what happened into the files, for review
    python tests/cluster/run.py --list

Exit 1: a run did not survive its faults, or took another course than its scenario expects. Its
files are kept, and their folder is printed. Exit 2: this machine can run no scenario; the reason is
printed. If no container can run, the scenarios run on namespaces of this machine.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Where `etcd_servers` lies: started by its path, this script finds only its own folder by itself.
sys.path.append(str(Path(__file__).parents[1] / "support"))

from apt import NotAvailable
from cluster import ENTER, Cluster
from compose import ARGUMENTS, PROFILES, RECIPE, Compose
from containers import Containers, engine, node_image
from machines import ROOT
from namespaces import Namespaces, need_namespaces
from oracle import Evidence, Verdict, evidence, history, judge
from pods import PodCluster
from scenario import Scenario, parse, rewritten
from scenario_runner import SAVES, TINY, ScenarioFailed, ScenarioRunner
from supervised import TEMPORARY, supervised

from elastic.agent.worker_process import ForkServerClient
from elastic.config import interpreter
from elastic.config.run_dir import RunDir
from elastic.errors import ElasticError

MakeMachines = Callable[[], Containers | Namespaces]
SCENARIOS = ROOT / "tests" / "scenarios" / "cluster"
# One of each kind: no fault, a worker, a node, a node that comes back, a planned stop, the network,
# damage, a fault during a recovery, a wait for enough nodes, and a fault of each backend.
QUICK = (
    "undisturbed",
    "worker_killed",
    "node_of_rank_0_killed",
    "zombie",
    "all_terminated",
    "cut_and_healed",
    "newest_flipped",
    "second_fault_in_recovery",
    "below_min",
    "etcd_member_killed",
    "c10d_host_killed",
    "storage_503",
)
FAILURES = ScenarioFailed, TimeoutError, RuntimeError, NotAvailable, ElasticError


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """verdict: None if the case did not run to its end. kept: folder with the files of a failed
    case.
    """

    name: str
    verdict: Verdict | None
    problems: list[str]
    took_s: float
    kept: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """How machines are made here, and the process that nodes are forked from."""

    make_machines: MakeMachines
    has_containers: bool
    warm: ForkServerClient


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--namespaces", action="store_true", help="no containers, even where they can run")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--list", action="store_true")
    wanted = parser.parse_args()
    scenarios = {path.stem: parse(path.stem, path.read_text()) for path in sorted(SCENARIOS.glob("*.txt"))}
    if unknown := set(wanted.names) - {*scenarios, *PROFILES}:
        parser.error(f"expected names of cases (--list), found {', '.join(sorted(unknown))}")
    if wanted.list:
        titles = {name: case.title for name, case in scenarios.items()}
        for name, title in (titles | {name: case.title for name, case in PROFILES.items()}).items():
            print(f"{name:24}{title}")
        return 0
    chosen = wanted.names or (list(QUICK) if wanted.quick else [*scenarios, *PROFILES])

    def play(run: str) -> int:
        began_s, results = time.monotonic(), []
        harness = open_harness(run, only_namespaces=wanted.namespaces)
        for name in chosen:
            scenario = scenarios.get(name)
            if not harness.has_containers and (scenario is None or "pods" in scenario.settings):
                print(f"{name}: NOT TESTED, it needs containers", flush=True)
                continue
            result = (
                _compose(name, run)
                if scenario is None
                else run_scenario(scenario, harness, update=wanted.update)
            )
            results.append(result)
            print_result(result)
        print(f"{len(results)} cases in {time.monotonic() - began_s:.0f} s")
        return 1 if any(result.problems for result in results) else 0

    return played(play)


def played(play: Callable[[str], int]) -> int:
    """The exit code of `play`, which gets the run's name; nothing of it is left."""

    def or_why_not(run: str) -> int:
        try:
            return play(run)
        except NotAvailable as reason:
            print(f"\nNOTHING WAS TESTED, BECAUSE NOTHING CAN BE HERE: {reason}\n", file=sys.stderr)
            return 2

    interpreter.pin_threads()  # as the command does
    interpreter.set_up_malloc()
    interpreter.fix_hashing()
    return supervised(or_why_not)


def open_harness(run: str, *, only_namespaces: bool) -> Harness:
    """Machines are containers, else namespaces, with a warning. Raises NotAvailable where neither
    is possible.

    run: the name that all of them begin with (supervised.py).
    """
    if os.geteuid() != 0:
        raise NotAvailable(
            "expected to be root, because only root may enter containers and cut their networks; run this as root"
        )
    numbers = itertools.count()
    make_machines: MakeMachines
    try:
        if only_namespaces:
            raise NotAvailable("namespaces were asked for")
        print(f"Docker engine {engine()}", flush=True)
        image = node_image()
        make_machines, has_containers = lambda: Containers(image, f"{run}{next(numbers):02x}"), True
    except NotAvailable as reason:
        need_namespaces()
        print(f"\nNO CONTAINERS ({reason}); THE SCENARIOS RUN ON NAMESPACES OF THIS MACHINE\n", flush=True)
        make_machines, has_containers = lambda: Namespaces(f"{run}{next(numbers):02x}"), False
    return Harness(
        make_machines=make_machines, has_containers=has_containers, warm=ForkServerClient.spawn(ENTER)
    )


def print_result(result: CaseResult) -> None:
    word, found = "FAILED" if result.problems else "survived", result.verdict
    line = f"{result.name:26}{word} in {result.took_s:.0f} s"
    if found is not None:
        waited = "no fault" if found.next_step_s is None else f"next step after {found.next_step_s:.2f} s"
        line += f"; {waited}, {found.lost_steps} steps lost, digest {(found.digest or 'none')[:16]}"
    print(line, flush=True)
    for problem in result.problems:
        print(f"    {problem}", flush=True)
    if result.kept is not None:
        print(f"    what it left is in {result.kept}", flush=True)


@cache
def undisturbed_evidence(recipe: Path, *arguments: str) -> Evidence:
    """The evidence of the recipe's run by one worker on this machine, in no container and without
    faults.
    """
    folder = Path(tempfile.mkdtemp(prefix="undisturbed-"))
    samples = folder / "samples"
    samples.mkdir()
    words = [sys.executable, "-m", "elastic.cli", str(recipe), "--run-dir", str(folder / "run"), *SAVES]
    env = os.environ | {"TINY_SAMPLES": str(samples)}
    subprocess.run([*words, "--", *arguments], check=True, stdout=subprocess.DEVNULL, env=env)
    return evidence(RunDir.parse(str(folder / "run")), samples)


def run_scenario(scenario: Scenario, harness: Harness, *, update: bool = False) -> CaseResult:
    """A scenario without an expected history is judged without it."""
    undisturbed, began_s = undisturbed_evidence(TINY), time.monotonic()
    verdict, happened, kept = None, [], None
    kind = PodCluster if "pods" in scenario.settings else Cluster
    with kind(
        harness.make_machines(),
        harness.warm,
        memory_mib=scenario.settings.get("memory"),
        shares_run="store" not in scenario.settings,
    ) as cluster:
        try:
            found = ScenarioRunner(scenario, cluster).run()
            verdict, happened = judge(found, undisturbed, scenario.within_s), history(found.events)
            problems = list(verdict.problems)
        except FAILURES as error:
            problems = [str(error)]
        if verdict is not None and update:
            path = SCENARIOS / f"{scenario.name}.txt"
            path.write_text(rewritten(path.read_text(), happened))
        elif verdict is not None and scenario.expected and happened != list(scenario.expected):
            problems += ["expected " + " | ".join(scenario.expected), "found    " + " | ".join(happened)]
        if problems:
            kept = _keep(scenario.name, cluster)
    took_s = time.monotonic() - began_s
    return CaseResult(name=scenario.name, verdict=verdict, problems=problems, took_s=took_s, kept=kept)


def _compose(name: str, run: str) -> CaseResult:
    verdict, began_s = None, time.monotonic()
    try:
        with Compose(PROFILES[name], run) as project:
            found = project.run()
        undisturbed = undisturbed_evidence(ROOT / RECIPE, *ARGUMENTS)
        verdict = judge(found, undisturbed, PROFILES[name].within_s)
        problems = list(verdict.problems)
    except FAILURES as error:
        problems = [str(error)]
    return CaseResult(name=name, verdict=verdict, problems=problems, took_s=time.monotonic() - began_s)


def _keep(name: str, cluster: Cluster) -> Path:
    """Keep the run, and what every node printed. Returns the folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"elastic-failed-{name}-", dir=TEMPORARY))
    for there in (cluster.shared, cluster.node_files):
        with suppress(shutil.Error):  # a socket cannot be copied; all else was
            shutil.copytree(there, folder, dirs_exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
