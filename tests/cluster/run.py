"""`make cluster`: run every scenario on containers, and print a line for each.

    python tests/cluster/run.py [NAME ...]    only these scenarios
    python tests/cluster/run.py --quick       one of each kind: what must pass before a merge

Exit 1: a run did not survive its faults, or took another course than its scenario expects. Its
files are kept, and their folder is printed. Exit 2: this machine can run no scenario; the reason is
printed.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

# Where `etcd_servers` lies: started by its path, this script finds only its own folder by itself.
sys.path.append(str(Path(__file__).parents[1] / "support"))

import compose
from apt import NotAvailable
from cluster import Cluster
from machines import ROOT, engine, make_image
from oracle import Evidence, Verdict, history, judge, undisturbed
from scenario import Scenario, parse
from scenario_runner import SHARDED, TINY, ScenarioFailed, ScenarioRunner
from supervised import keep, main

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


def play(run: str, cases: Sequence[Case]) -> int:
    """The exit code; see the head of this file. run: the name that all machines begin with
    (supervised.py).
    """
    if os.geteuid() != 0:
        raise NotAvailable("expected to be root, who alone may cut networks; run this as root")
    began_s = time.monotonic()
    print(f"Docker engine {engine()}", flush=True)
    make_image()
    failed = [
        case.name for count, case in enumerate(cases, start=1) if not survives(case, f"{run}{count:02x}")
    ]
    minutes = (time.monotonic() - began_s) / 60
    print(f"{len(cases)} cases in {minutes:.1f} minutes; failed: {', '.join(failed) or 'none'}")
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
            verdict = judge(found, expected, case.within)
            problems, said = [*verdict.problems, *_course(case, found)], _summary(verdict)
        except FAILURES as error:
            problems = [str(error)]
        word, took_s = "FAILED" if problems else "survived", time.monotonic() - began_s
        print(f"{case.name:26}{word} in {took_s:.0f} s{said}", *problems, sep="\n    ", flush=True)
        if problems and cluster is not None:
            print(f"    what it left is in {keep(case.name, cluster.shared, cluster.node_files)}", flush=True)
    return not problems


def _course(case: Case, found: Evidence) -> list[str]:
    """What differs from the history that a scenario expects."""
    happened = tuple(history(found.events))
    if isinstance(case, compose.Profile):
        return []
    expected = (SHARDED and case.sharded) or case.expected
    if happened == expected:
        return []
    return ["expected " + " | ".join(expected), "found    " + " | ".join(happened)]


def _summary(found: Verdict) -> str:
    waited = "no fault" if found.next_step_s is None else f"next step after {found.next_step_s:.2f} s"
    return f"; {waited}, {found.lost_steps} steps lost, digest {(found.digest or 'none')[:16]}"


if __name__ == "__main__":
    read: list[Case] = [parse(path.stem, path.read_text()) for path in sorted(SCENARIOS.glob("*.txt"))]
    sys.exit(main(__doc__, {case.name: case for case in [*read, *compose.PROFILES]}, play, QUICK))
