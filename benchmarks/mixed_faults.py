"""A run of two nodes under random faults, drawn from a seed, ends like an undisturbed run.

python benchmarks/mixed_faults.py [--seed 1] [--minutes 5] [--mtbf 4] [--folder DIR]

The kinds of faults are drawn from the mix in fault_schedule.py. The run is judged by the rules of
tests/cluster/oracle.py: the undisturbed digest, every step once and with its chain value, one
commit a step, no commit from outside of the newest generation, no start from nothing. Beside the
goodput stands the goodput that the formula expects from the measured recoveries. Exit 1: the judge
found a problem.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from fault_schedule import HARMLESS, FaultKind, PlannedFault, expected_goodput, fault_schedule
from soak import NODES, WORKERS, Soak

HERE = Path(__file__).parent
for name in ("cluster", "support"):  # at the end, so that they hide no module of ours
    sys.path.append(str(HERE.parent / "tests" / name))

from evidence import evidence  # noqa: E402
from oracle import Injection, judge  # noqa: E402

from elastic.config.run_dir import RunDir  # noqa: E402
from elastic.observe import metrics  # noqa: E402
from elastic.observe.log import read_events  # noqa: E402
from elastic.observe.step_line import StepLine  # noqa: E402
from elastic.report.report import Report, summarise  # noqa: E402

PROBE_EPOCHS = 40
STEPS_AN_EPOCH = 20
SILENCE_S = 4.0  # twice the keep-alive
SLOW_S, SLOW_TIMES = 0.2, 10
WITHIN_S = 120.0
LIMIT_S = 3600.0
SIGNALS = {
    FaultKind.WORKER_KILLED: signal.SIGKILL,
    FaultKind.WORKER_ABORTED: signal.SIGABRT,
    FaultKind.WORKER_SEGFAULT: signal.SIGSEGV,
    FaultKind.WORKER_HANGS: signal.SIGSTOP,
    FaultKind.UPLOADER_KILLED: signal.SIGKILL,
    FaultKind.FORK_SERVER_KILLED: signal.SIGKILL,
}
KINDS = {FaultKind.UPLOADER_KILLED: "uploader", FaultKind.FORK_SERVER_KILLED: "fork server"}


@dataclass(slots=True)
class Resume:
    """SIGCONT to these processes, when the silence of their node ends."""

    at_s: float
    pids: list[int]


class Chaos(Soak):
    """The group of the soak test, under a schedule of faults."""

    # With the default of 10 s, the next fault would end a hang before it is detected.
    options = ("--hang-timeout", "3")

    def __init__(self, folder: Path, epochs: int) -> None:
        super().__init__(folder, epochs, seed=0)
        self.run = RunDir.parse(str(folder / "run"))
        self.injections: list[Injection] = []
        self.counted: Counter[FaultKind] = Counter()
        self._resumes: list[Resume] = []

    def inject_all(self, faults: list[PlannedFault]) -> None:
        """Inject the faults at their times, until all are injected or the run is over."""
        began_s = time.monotonic()
        for fault in faults:
            while (left_s := began_s + fault.at_s - time.monotonic()) > 0 and not self.is_over():
                self.resume_due()
                self.restart()
                time.sleep(min(left_s, 0.2))
            if self.is_over():
                break
            self.inject(fault)
        while self._resumes:
            self.resume_due()
            time.sleep(0.05)

    def inject(self, fault: PlannedFault) -> None:
        self.restart()
        injection = self._now()
        pids = self._victims(fault)
        if not pids:
            return
        match fault.kind:
            case FaultKind.NODE_KILLED | FaultKind.NODE_DRAINED:
                is_drain = fault.kind is FaultKind.NODE_DRAINED
                _send(pids[:1], signal.SIGTERM if is_drain else signal.SIGKILL)
            case FaultKind.NODE_SILENT:
                _send(pids, signal.SIGSTOP)
                self._resumes.append(Resume(at_s=time.monotonic() + SILENCE_S, pids=pids))
            case FaultKind.WORKER_SLOW:
                for turn in range(SLOW_TIMES):
                    _send(pids, signal.SIGSTOP)
                    time.sleep(SLOW_S)
                    _send(pids, signal.SIGCONT)
                    time.sleep(SLOW_S if turn else 0)
            case kind:
                _send(pids, SIGNALS[kind])
        self.counted[fault.kind] += 1
        if fault.kind not in HARMLESS:
            self.injections.append(injection)

    def resume_due(self) -> None:
        due = [resume for resume in self._resumes if resume.at_s <= time.monotonic()]
        for resume in due:
            _send(resume.pids, signal.SIGCONT)
            self._resumes.remove(resume)

    def restart(self) -> None:
        """Start a node again that ended before the run did, as a cluster's scheduler would."""
        for agent in [agent for agent in self.agents if agent.poll() is not None]:
            if not self.is_over():
                self.agents.remove(agent)
                self.start_node()

    def _victims(self, fault: PlannedFault) -> list[int]:
        """The processes that the fault hits.

        None, if there is no process of that kind, or if the fault would hit the last node
        that trains: the loss of all nodes is no case of this test.
        """
        if fault.kind in (FaultKind.NODE_KILLED, FaultKind.NODE_DRAINED, FaultKind.NODE_SILENT):
            agents = [agent.pid for agent in self.agents if agent.poll() is None]
            if len(agents) < NODES or len(self.find("worker")) < NODES * WORKERS or self._resumes:
                return []
            return self._node(agents[int(fault.victim * len(agents))])
        found = self.find(KINDS.get(fault.kind, "worker"))
        return [found[int(fault.victim * len(found))]] if found else []

    def _node(self, agent: int) -> list[int]:
        """The agent and all its descendants, parents first."""
        parents = {pid: parent for pid, parent, _ in self.processes()}
        found = [agent]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid and child not in found]
        return found

    def _now(self) -> Injection:
        newest = metrics.newest(self.run.metrics) or StepLine(step=0)
        return Injection(time=time.time(), step=newest.step, generation=newest.generation)


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def train_undisturbed(folder: Path, epochs: int) -> Chaos:
    """The same run without faults, by as many nodes."""
    folder.mkdir(parents=True)
    run = Chaos(folder, epochs)
    try:
        for _ in range(NODES):
            run.start_node()
        for agent in run.agents:
            agent.wait(LIMIT_S)
    finally:
        run.close()
    return run


def train_with_faults(folder: Path, epochs: int, faults: list[PlannedFault]) -> Chaos:
    folder.mkdir(parents=True)
    run = Chaos(folder, epochs)
    began_s = time.monotonic()
    try:
        for _ in range(NODES):
            run.start_node()
        while not metrics.newest(run.run.metrics) and not run.is_over():
            time.sleep(0.1)
        run.inject_all(faults)
        while not run.is_over() and time.monotonic() - began_s < LIMIT_S:
            run.restart()
            time.sleep(0.5)
        for agent in run.agents:
            agent.wait(WITHIN_S)
    except subprocess.TimeoutExpired as error:
        print(f"a node did not end: {error}")
    finally:
        run.close()
    return run


def report_of(run: RunDir) -> Report:
    return summarise(read_events(run.events), metrics.read(run.metrics))


def expected(report: Report, undisturbed: Report) -> float:
    """The goodput by the formula from this run's recovery times, times the undisturbed goodput.

    Every step is kept in memory, so the interval is one step, and keeping it costs nothing.
    """
    times_s = [each.total_s for each in report.recoveries if each.total_s is not None]
    step_s = report.step_time_s.median
    if not times_s or not report.goodput or step_s is None:
        return undisturbed.goodput or 0.0
    wall_s = step_s * report.steps / report.goodput
    found = expected_goodput(
        mtbf_s=wall_s / len(times_s), recovery_s=mean(times_s), interval_s=step_s, save_s=0.0
    )
    return found * (undisturbed.goodput or 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--mtbf", type=float, default=4.0, help="seconds from one fault to the next, on average"
    )
    parser.add_argument("--folder", type=Path, help="where the runs stay [a temporary folder]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return chaos(args, args.folder or Path(temporary))


def chaos(args: argparse.Namespace, folder: Path) -> int:
    probe = report_of(train_undisturbed(folder / "probe", PROBE_EPOCHS).run)
    assert probe.step_time_s.median is not None, "the probe trained no step"
    rate = (probe.goodput or 1.0) / probe.step_time_s.median
    epochs = max(PROBE_EPOCHS, int(args.minutes * 60 * rate / STEPS_AN_EPOCH))
    faults = fault_schedule(args.seed, mtbf_s=args.mtbf, duration_s=args.minutes * 60)
    print(f"seed {args.seed}: {len(faults)} faults in {args.minutes:g} minutes, {epochs} epochs", flush=True)
    undisturbed, run = (
        train_undisturbed(folder / "undisturbed", epochs),
        train_with_faults(folder / "disturbed", epochs, faults),
    )
    with_faults, without_faults = report_of(run.run), report_of(undisturbed.run)
    verdict = judge(evidence(run.run, injections=run.injections), evidence(undisturbed.run), WITHIN_S)
    print(json.dumps({kind.value: count for kind, count in run.counted.items()}))
    print(f"{len(with_faults.recoveries)} recoveries, {verdict.lost_steps} finished steps lost")
    print(
        f"goodput {with_faults.goodput or 0.0:.3f}, expected {expected(with_faults, without_faults):.3f}; undisturbed {without_faults.goodput or 0.0:.3f}"
    )
    for problem in verdict.problems:
        print(f"NOT as promised: {problem}")
    print("as promised" if verdict.survived else f"replay with --seed {args.seed}")
    return 0 if verdict.survived else 1


if __name__ == "__main__":
    sys.exit(main())
