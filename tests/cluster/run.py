"""`make cluster`: run every scenario on containers, and print a line for each.

    python tests/cluster/run.py [NAME ...]    only these scenarios
    python tests/cluster/run.py --quick       one of each kind: what must pass before a merge
    python tests/cluster/run.py --random [--seed 1] [--minutes 10 | --cases N] [--place PLACE]

`make chaos` is the last one: random scenarios, one after the other, on all places where nodes can
meet. Case n has seed `--seed` + n and the next place. Each is drawn by random_scenario.py and
judged by the same rules. The log has the command that plays a failed case again, and its text.

Exit 1: a run did not survive its faults, or took another course than its scenario expects. Its
files are kept, and their folder is printed. Exit 2: this machine can run no scenario; the reason is
printed.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

# Where `etcd_servers` lies: started by its path, this script finds only its own folder by itself.
sys.path.append(str(Path(__file__).parents[1] / "support"))

import compose
from apt import NotAvailable
from cluster import Cluster
from machines import ROOT, engine, make_image
from oracle import Evidence, Verdict, history, judge, undisturbed
from random_scenario import Place, draw_scenario
from scenario import Scenario, parse
from scenario_runner import TINY, ScenarioFailed, ScenarioRunner
from supervised import TEMPORARY, supervised

from elastic.errors import ElasticError

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
Case = Scenario | compose.Profile
FAILURES = ScenarioFailed, TimeoutError, RuntimeError, NotAvailable, ElasticError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    for flag in ("--quick", "--random"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no case after that [10]")
    parser.add_argument("--cases", type=int, help="how many, whatever time they take")
    parser.add_argument("--place", type=Place, help=", ".join(place.value for place in Place))
    wanted = parser.parse_args()
    scenarios = {path.stem: parse(path.stem, path.read_text()) for path in sorted(SCENARIOS.glob("*.txt"))}
    cases: dict[str, Case] = {
        **scenarios,
        **{case.name: case for case in compose.PROFILES},
    }
    if unknown := set(wanted.names) - {*cases}:
        parser.error(f"expected names of {', '.join(cases)}, found {', '.join(sorted(unknown))}")
    names = wanted.names or (QUICK if wanted.quick else [*cases])
    chosen = drawn(wanted) if wanted.random else (cases[name] for name in names)
    return supervised(lambda run: play(run, chosen))


def drawn(wanted: argparse.Namespace) -> Iterator[Scenario]:
    """Random scenarios, until there are as many as are wanted, or for as long."""
    end_s = time.monotonic() + 60 * wanted.minutes
    for number in itertools.count():
        if number == wanted.cases or (wanted.cases is None and time.monotonic() > end_s):
            return
        seed = wanted.seed + number
        place = wanted.place or list(Place)[seed % len(Place)]
        text = draw_scenario(seed, place)
        print(f"{text}play it again: make chaos SEED={seed} PLACE={place.value} CASES=1", flush=True)
        yield parse(f"chaos-{seed}-{place.value}", text)


def play(run: str, cases: Iterable[Case]) -> int:
    """The exit code; see the head of this file. run: the name that all machines begin with
    (supervised.py).
    """
    began_s, failed = time.monotonic(), []
    try:
        if os.geteuid() != 0:
            raise NotAvailable("expected to be root, who alone may cut networks; run this as root")
        print(f"Docker engine {engine()}", flush=True)
        make_image()
    except NotAvailable as reason:
        print(f"\nNOTHING WAS TESTED, BECAUSE NOTHING CAN BE HERE: {reason}\n", file=sys.stderr)
        return 2
    count = 0
    for count, case in enumerate(cases, start=1):
        if not survives(case, f"{run}{count:02x}"):
            failed.append(case.name)
    minutes = (time.monotonic() - began_s) / 60
    print(f"{count} cases in {minutes:.1f} minutes; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


@cache
def _undisturbed(recipe: Path, *arguments: str) -> Evidence:
    return undisturbed(recipe, Path(tempfile.mkdtemp(prefix="undisturbed-")), *arguments)


def survives(case: Case, name: str) -> bool:
    """Play and judge a case, and print how it went."""
    if isinstance(case, Scenario):
        expected = _undisturbed(TINY)
    else:
        expected = _undisturbed(compose.RECIPE, *compose.ARGUMENTS)
    began_s, said, cluster = time.monotonic(), "", None
    with ExitStack() as stack:
        try:
            if isinstance(case, Scenario):
                cluster = Cluster(name, case.settings)
                found = ScenarioRunner(case, stack.enter_context(cluster)).run()
            else:
                found = compose.play(case, name)
            verdict = judge(found, expected, case.settings["within"])
            problems, said = [*verdict.problems, *_course(case, found)], _summary(verdict)
        except FAILURES as error:
            problems = [str(error)]
        word, took_s = "FAILED" if problems else "survived", time.monotonic() - began_s
        print(f"{case.name:26}{word} in {took_s:.0f} s{said}", *problems, sep="\n    ", flush=True)
        if problems and cluster is not None:
            print(f"    what it left is in {_keep(case.name, cluster)}", flush=True)
    return not problems


def _course(case: Case, found: Evidence) -> list[str]:
    """What differs from the history that a scenario expects."""
    expected, happened = case.expected, tuple(history(found.events))
    if not expected or happened == expected:
        return []
    return ["expected " + " | ".join(expected), "found    " + " | ".join(happened)]


def _summary(found: Verdict) -> str:
    waited = "no fault" if found.next_step_s is None else f"next step after {found.next_step_s:.2f} s"
    return f"; {waited}, {found.lost_steps} steps lost, digest {(found.digest or 'none')[:16]}"


def _keep(name: str, cluster: Cluster) -> Path:
    """Keep the run, and what every node printed. Returns the folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"elastic-failed-{name}-", dir=TEMPORARY))
    for there in (cluster.shared, cluster.node_files):
        with suppress(shutil.Error):  # a socket cannot be copied; all else was
            shutil.copytree(there, folder, dirs_exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
