"""Seconds from a fault to the end of the first new step, for elastic-train and for torchrun.

python benchmarks/recovery.py [--only join] [--tries 10] [--torchrun-tries 1] [--json FILE]
    [--standby on] [--script-s 5]: with standby workers; with scripts that take seconds to start

Two nodes of one worker each train on this machine. A node is a launcher and everything that it
started. Each fault hits a random (seeded) moment of a step, once the group has trained five new
steps. The time ends with the first new step of a worker that started after the fault. A step is new
if it was never finished before.

elastic-train has all its faults in one run. torchrun gets a new job for each try and may restart
without limit (its default is never); it never loses the node that holds its store, because that
ends the job. "torchrun best" has the shortest last call and keep-alive that torchrun accepts, and
runs without the shared store, which breaks joins. A try is given up after --limit seconds: no
recovery is a result too.

The figures say nothing about many machines: all processes share the cores of this one, so work that
several do at the same time is slower here.
"""

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recovery_cases import CASES, Case, Measured
from recovery_group import Group, Launcher, NotRecovered
from recovery_table import comparison, notes, phases
from rich.console import Console

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
IMPORTS = "import torch, torchvision, torch._dynamo"
IMPORT_TRIES = 3
OURS = "ours"


# The launchers.


def ours(args: argparse.Namespace) -> Launcher:
    def command(folder: Path, _port: int, _nodes: int) -> list[str]:
        words = [
            str(BIN / "elastic-train"),
            str(HERE / "recovery_ours.py"),
            "--rehearse",
            "off",
            "--run-dir",
            str(folder / "run"),
        ]
        words += ["--min-nodes", "1", "--max-nodes", "2", "--nproc-per-node", "1", "--max-restarts", "100"]
        words += ["--standby", args.standby, *shlex.split(args.ours_options)]
        return [*words, "--", str(args.global_batch), str(args.shards), str(args.script_s)]

    standbys = 1 if args.standby == "on" else 0
    return Launcher(name=OURS, command=command, env={}, spares_first=False, standbys=standbys)


def torchrun(args: argparse.Namespace, name: str, conf: str, env: dict[str, str]) -> Launcher:
    def command(folder: Path, port: int, nodes: int) -> list[str]:
        words = [str(BIN / "torchrun"), "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=100"]
        words += ["--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        # Both nodes are on the store's machine: without is_host, either could come to hold the
        # store.
        words += ["--rdzv-id=job", f"--rdzv-conf=is_host={int(nodes == 0)}{conf}", "--local-addr=127.0.0.1"]
        words += [str(HERE / "recovery_torchrun.py"), str(args.global_batch), str(args.torchrun_save_every)]
        return [*words, str(folder / "checkpoint.pt"), str(args.script_s)]

    return Launcher(name=name, command=command, env=env, spares_first=True)


def launchers(args: argparse.Namespace) -> list[Launcher]:
    shortest = ",last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        ours(args),
        torchrun(args, "torchrun default", "", {}),
        torchrun(args, "torchrun best", shortest, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    ]


# Measuring.


class Trial:
    """All tries of one launcher.

    A group that does not recover is replaced by a new one. `groups`: the folders of all groups.
    """

    def __init__(self, launcher: Launcher, args: argparse.Namespace, folder: Path) -> None:
        self.measured: list[Measured] = []
        self.steps_s: list[float] = []
        self.groups: list[Path] = []
        self._launcher = launcher
        self._limit_s = args.limit
        self._rng = random.Random(args.seed)  # noqa: S311 - moments of faults, not secrets
        self._folder = folder
        self._group: Group | None = None

    def run(self, case: Case, tries: int, *, fresh: bool) -> None:
        """fresh: use a new group for each try."""
        for _ in range(tries):
            # Another case may have measured this one already, to reach the number of nodes that it
            # needs.
            if sum(m.what == case.rows[0] for m in self.measured) >= tries:
                return
            if self._try_once(case, self._group or self._start(case.nodes)) and not fresh:
                continue
            self.close()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def _start(self, nodes: int) -> Group:
        folder = self._folder / f"{self._launcher.name.replace(' ', '-')}-{len(self.groups)}"
        self.groups.append(folder)
        self._group = Group(self._launcher, folder, self._limit_s, self._rng)
        for _ in range(nodes):
            self._group.start_node()
        return self._group

    def _try_once(self, case: Case, group: Group) -> bool:
        """Whether the group recovered.

        Each figure is printed at once, for those who watch an hour of this.
        """
        way = {1: [CASES["join"]], 0: [], -1: [CASES["term-one"]]}[case.nodes - len(group.nodes)]
        for each in [*way, case]:
            rows = list(each.rows)
            try:
                for figure in each.run(group):
                    rows = rows[rows.index(figure.what) + 1 :]
                    self._note(figure)
            except NotRecovered as failure:
                self._note(Measured(what=rows[0], seconds=None, note=str(failure)))
                return False
        self.steps_s.append(group.step_s())
        return True

    def _note(self, figure: Measured) -> None:
        self.measured.append(figure)
        seconds = "not recovered" if figure.seconds is None else f"{figure.seconds:.2f} s"
        lost = "" if figure.lost_steps is None else f", {figure.lost_steps} steps lost"
        print(
            f"{self._launcher.name}: {figure.what}: {seconds}{lost} {figure.note}",
            file=sys.stderr,
            flush=True,
        )


def imports_s() -> list[float]:
    """The cost of a start before any code of the user runs, in seconds."""
    taken = []
    for _ in range(IMPORT_TRIES):
        start_s = time.monotonic()
        subprocess.run([sys.executable, "-c", IMPORTS], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        taken.append(time.monotonic() - start_s)
    return taken


def recoveries(groups: list[Path]) -> list[dict[str, Any]]:
    """The recoveries in the reports of elastic-train about its own runs."""
    found: list[dict[str, Any]] = []
    for group in groups:
        words = [str(BIN / "elastic-train"), "report", str(group / "run"), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found += json.loads(done.stdout)["recoveries"]
        else:
            print(f"no report of {group}: {done.stderr or done.stdout}", file=sys.stderr)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=CASES, action="append", help="a case; may be repeated [all]")
    parser.add_argument("--tries", type=int, default=10, help="of ours, each case")
    parser.add_argument("--torchrun-tries", type=int, default=1, help="of each torchrun, each case; 0: none")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds until a try is given up")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--shards", type=int, default=2, help="of ours, at least the 2 nodes that may come")
    parser.add_argument("--ours-options", default="--snapshot-every 1 --keep-alive 2")
    parser.add_argument("--standby", choices=("on", "off"), default="off", help="of ours")
    parser.add_argument("--script-s", type=float, default=0.0, help="that each script takes besides")
    parser.add_argument("--torchrun-save-every", type=int, default=10, help="steps between its checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    parser.add_argument("--folder", type=Path, help="where runs and logs are left [a temporary folder]")
    parser.add_argument("--json", type=Path, help="file for every single figure")
    return parser.parse_args()


def measure(args: argparse.Namespace, folder: Path) -> None:
    imports = imports_s()
    results: dict[str, list[Measured]] = {}
    steps_s: dict[str, float] = {}
    reported: list[dict[str, Any]] = []
    for launcher in launchers(args):
        is_ours = launcher.name == OURS
        tries = args.tries if is_ours else args.torchrun_tries
        trial = Trial(launcher, args, folder)
        try:
            for name in args.only or CASES:
                trial.run(CASES[name], tries, fresh=not is_ours)
        finally:
            trial.close()
        results[launcher.name] = trial.measured
        steps_s[launcher.name] = statistics.median(trial.steps_s) if trial.steps_s else float("nan")
        reported += recoveries(trial.groups) if is_ours else []
    steps = ", ".join(f"{name} {step_s:.3f} s" for name, step_s in steps_s.items())
    imported_s = statistics.median(imports)
    # A file or a pipe has no width of its own, and 80 columns are too few.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(comparison(results, f"a step: {steps}; bare imports: {imported_s:.2f} s"))
    for line in notes(results):
        console.print(line)
    if reported:
        console.print(phases(reported))
    if args.json:
        settings = {name: str(value) for name, value in vars(args).items()}
        figures = {name: [asdict(m) for m in measured] for name, measured in results.items()}
        everything = {"settings": settings, "imports_s": imports, "step_s": steps_s, "figures": figures}
        args.json.write_text(json.dumps(everything | {"recoveries": reported}, indent=1))


def main() -> None:
    args = arguments()
    # SIGTERM to this process ends everything that it started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        measure(args, folder)


if __name__ == "__main__":
    main()
