"""`make cluster`: run every scenario on containers, and print one table.

    python tests/cluster/run.py [NAME ...]    only these scenarios
    python tests/cluster/run.py --quick       one of each kind: what must pass before a merge
    python tests/cluster/run.py --update      write what happened into the files, for review
    python tests/cluster/run.py --list

Exit 1: a run did not survive its faults, or took another course than its scenario expects. Its
files are kept, and their folder is printed. Exit 2: this machine can run no scenario; the reason is
printed. If no container can run, the scenarios run on namespaces of this machine.
"""

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

# Where `etcd_servers` lies: started by its path, this script finds only its own folder by itself.
sys.path.append(str(Path(__file__).parents[1] / "support"))

from cluster import ENTER, Cluster, Limits
from compose import ARGUMENTS, PROFILES, RECIPE, Compose
from containers import Containers
from engine import NoEngine, engine
from evidence import evidence
from image import ROOT, node_image
from machines import Machines
from namespaces import Namespaces, need_namespaces
from oracle import Evidence, Verdict, history, judge
from pods import PodCluster
from rich.console import Console
from rich.table import Table
from scenario import Scenario, parse, rewritten
from scenario_runner import SAVES, TINY, ScenarioFailed, ScenarioRunner

from elastic.agent.workers.fork_server_client import ForkServerClient
from elastic.config import interpreter
from elastic.config.run_dir import RunDir
from elastic.errors import ElasticError

MakeMachines = Callable[[], Machines]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """verdict: None if the case did not run to its end. kept: folder with the files of a failed
    case.
    """

    name: str
    verdict: Verdict | None
    problems: list[str]
    took_s: float
    kept: Path | None


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
        for name, scenario in scenarios.items():
            print(f"{name:24}{scenario.title}")
        for name, profile in PROFILES.items():
            print(f"{name:24}{profile.title}")
        return 0
    chosen = wanted.names or (list(QUICK) if wanted.quick else [*scenarios, *PROFILES])
    return with_machines(
        wanted.namespaces,
        lambda machines: _run_all(chosen, scenarios, machines, update=wanted.update),
        chosen,
        {*PROFILES, *(name for name, scenario in scenarios.items() if scenario.has_pods)},
    )


def with_machines(
    only_namespaces: bool,
    play: Callable[[MakeMachines], int],
    chosen: list[str] | None = None,
    need_containers: Collection[str] = (),
) -> int:
    """The exit code of `play`, which gets how machines are made here; none is left after it.

    chosen: the cases; where there are no containers, those that need them are taken out.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        with _machines(only_namespaces, chosen or [], need_containers) as make_machines:
            return play(make_machines)
    except NoEngine as reason:
        print(f"\nNOTHING WAS TESTED, BECAUSE NOTHING CAN BE HERE: {reason}\n", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; every container is removed", file=sys.stderr)
        return 130


@contextmanager
def _machines(
    only_namespaces: bool, chosen: list[str], need_containers: Collection[str]
) -> Iterator[MakeMachines]:
    """How machines are made here: as containers, else as namespaces, with a warning.

    Raises NoEngine if neither is possible.
    """
    if os.geteuid() != 0:
        raise NoEngine(
            "expected to be root, because only root may enter containers and cut their networks; run this as root"
        )
    with ExitStack() as stack:
        try:
            if only_namespaces:
                raise NoEngine("namespaces were asked for")
            version = stack.enter_context(engine())
            image = node_image()
        except NoEngine as reason:
            need_namespaces()
            print(
                f"\nNO CONTAINERS ({reason}); THE SCENARIOS RUN ON NAMESPACES OF THIS MACHINE\n",
                flush=True,
            )
            for name in set(need_containers) & set(chosen):
                chosen.remove(name)
                print(f"{name}: NOT TESTED, it needs containers", flush=True)
            yield lambda: Namespaces(secrets.token_hex(4))
            return
        print(f"Docker engine {version}; {len(chosen)} cases", flush=True)
        yield lambda: Containers(image, secrets.token_hex(4))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """End by KeyboardInterrupt, which removes all machines; ignore further signals meanwhile."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run_all(
    names: list[str], scenarios: dict[str, Scenario], make_machines: MakeMachines, *, update: bool
) -> int:
    began_s = time.monotonic()
    interpreter.pin_threads()  # as the command does
    interpreter.restart()  # nodes are forks of a child of this process, and hash strings as it does
    warm = ForkServerClient.spawn(ENTER)
    try:
        undisturbed = undisturbed_evidence(TINY)
        results = []
        for name in names:
            if name in PROFILES:
                result = _compose(name)
            else:
                result = run_scenario(scenarios[name], make_machines, warm, undisturbed, update=update)
            results.append(result)
            print_result(result)
    finally:
        warm.close()
    Console().print(_table(results))
    print(f"{len(results)} cases in {time.monotonic() - began_s:.0f} s")
    return 1 if any(result.problems for result in results) else 0


def print_result(result: CaseResult) -> None:
    print(
        f"{result.name}: {'FAILED' if result.problems else 'survived'}, {result.took_s:.0f} s",
        flush=True,
    )
    for problem in result.problems:
        print(f"    {problem}", flush=True)
    if result.kept is not None:
        print(f"    what it left is in {result.kept}", flush=True)


@cache
def undisturbed_evidence(recipe: Path, *arguments: str) -> Evidence:
    """The evidence of the recipe's run by one worker on this machine, in no container and without
    faults.
    """
    folder = Path(tempfile.mkdtemp(prefix="elastic-undisturbed-"))
    samples = folder / "samples"
    samples.mkdir()
    words = [sys.executable, "-m", "elastic.cli", str(recipe), "--run-dir", str(folder / "run"), *SAVES]
    env = os.environ | {"TINY_SAMPLES": str(samples)}
    try:
        subprocess.run([*words, "--", *arguments], check=True, stdout=subprocess.DEVNULL, env=env)
        return evidence(RunDir.parse(str(folder / "run")), samples)
    finally:
        shutil.rmtree(folder)


def run_scenario(
    scenario: Scenario,
    make_machines: MakeMachines,
    warm: ForkServerClient,
    undisturbed: Evidence,
    *,
    update: bool = False,
) -> CaseResult:
    """A scenario without an expected history is judged without it."""
    began_s = time.monotonic()
    verdict, happened, kept = None, [], None
    limits = Limits(
        memory_mib=scenario.memory_mib, volume_mib=scenario.volume_mib, disk_mib=scenario.disk_mib
    )
    kind, idle = (PodCluster, 0) if scenario.has_pods else (Cluster, scenario.nodes)
    with kind(make_machines(), warm, idle, limits, not scenario.has_store) as cluster:
        try:
            found = ScenarioRunner(scenario, cluster).run()
            verdict, happened = judge(found, undisturbed, scenario.within_s), history(found.events)
            problems = list(verdict.problems)
        except (ScenarioFailed, TimeoutError, RuntimeError, NoEngine, ElasticError) as error:
            problems = [str(error)]
        if verdict is not None and happened != list(scenario.expected) and (scenario.expected or update):
            if update:
                path = SCENARIOS / f"{scenario.name}.txt"
                path.write_text(rewritten(path.read_text(), happened))
            else:
                problems += [
                    "expected " + " | ".join(scenario.expected),
                    "found    " + " | ".join(happened),
                ]
        if problems:
            kept = _keep(scenario.name, cluster)
    took_s = time.monotonic() - began_s
    return CaseResult(name=scenario.name, verdict=verdict, problems=problems, took_s=took_s, kept=kept)


def _compose(name: str) -> CaseResult:
    began_s = time.monotonic()
    verdict = None
    try:
        with Compose(PROFILES[name]) as project:
            found = project.run()
        undisturbed = undisturbed_evidence(ROOT / RECIPE, *ARGUMENTS)
        verdict = judge(found, undisturbed, PROFILES[name].within_s)
        problems = list(verdict.problems)
    except (ScenarioFailed, TimeoutError, RuntimeError, ElasticError) as error:
        problems = [str(error)]
    took_s = time.monotonic() - began_s
    return CaseResult(name=name, verdict=verdict, problems=problems, took_s=took_s, kept=None)


def _keep(name: str, cluster: Cluster) -> Path:
    """Keep the run, and what every node printed. Returns the folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"elastic-failed-{name}-"))
    for there in (cluster.shared, cluster.node_files):
        with suppress(shutil.Error):  # a socket cannot be copied; all else was
            shutil.copytree(there, folder, dirs_exist_ok=True)
    return folder


def _table(results: list[CaseResult]) -> Table:
    table = Table(title="What survives what")
    table.add_column("case", no_wrap=True)
    table.add_column("survived")
    for name in ("seconds to next step", "steps lost"):
        table.add_column(name, justify="right")
    table.add_column("digest", no_wrap=True)
    for result in results:
        table.add_row(result.name, "no" if result.problems else "yes", *_measured(result.verdict))
    return table


def _measured(verdict: Verdict | None) -> tuple[str, str, str]:
    if verdict is None:
        return "–", "–", "–"  # noqa: RUF001 - the dash of the table
    waited = "–" if verdict.next_step_s is None else f"{verdict.next_step_s:.2f}"  # noqa: RUF001 - as above
    return waited, str(verdict.lost_steps), (verdict.digest or "none")[:16]


if __name__ == "__main__":
    sys.exit(main())
