"""What a step costs with elastic-train, beside plain PyTorch and DistributedDataParallel.

python benchmarks/steady.py [--all | --only NAME ...] [--markdown FILE] [--json FILE]

Each cell of the table trains one model with as many workers, shards a worker and bits as its name
says: `resnet18-2w-4s-bf16`. All use one thread a worker, and elastic-train its default settings,
but for saves, which are rare. One worker stands beside a plain script, several beside
DistributedDataParallel under torchrun, with the same samples a rank; where a worker has several
shards, they accumulate over as many micro-batches. The programs of a cell live at once and train in
turns, so that whatever else the machine does hits all of them. malloc takes large pages, as
elastic-train asks for, in the others too, which makes them faster. The ratio is the median over
neighbouring turns, with its standard error; half of the pairs are in the range beside it.

Without --all the cells are some of the product of all axes, in which each value of each axis
occurs; the last lines name the others. --only takes names and patterns, such as 'gpt-*'.

With GPUs the same command uses them (nccl, autocast), one a worker, and leaves out cells with more
workers. That was not run yet.

Exit 1: a program of a cell failed, or the time was up; what was measured is shown all the same.
Exit 2: no such cell. A signal ends it with what was measured until then.
"""

import argparse
import datetime as dt
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import steady_table
import torch
from rich.console import Console
from steady_cells import Choice, choose
from steady_measure import Pace, Result, measure
from steady_programs import Ended


@dataclass(slots=True, kw_only=True)
class Session:
    """What one call of the benchmark found."""

    about: dict[str, Any]
    choice: Choice
    results: list[Result] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def not_begun(self) -> list[str]:
        done = [result.cell.name for result in self.results] + self.failed
        return [cell.name for cell in self.choice.cells if cell.name not in done]

    def measure(self, pace: Pace, limit_s: float) -> None:
        """A cell that fails costs itself alone. None begins after `limit_s`."""
        until_s = time.monotonic() + limit_s
        for number, cell in enumerate(self.choice.cells, 1):
            if time.monotonic() > until_s:
                return
            print(f"{number} of {len(self.choice.cells)}: {cell.name}", flush=True)
            try:
                self.results.append(measure(cell, pace))
            except (Ended, OSError) as error:  # a worker that ended has no files in /proc
                self.failed.append(cell.name)
                print(error, file=sys.stderr)

    def tables(self) -> list[steady_table.Lines]:
        found = steady_table.of_time(self.results), steady_table.of_memory(self.results)
        return [table for table in found if table.rows]

    def remarks(self) -> list[str]:
        about = ", ".join(f"{name} {value}" for name, value in self.about.items())
        return [*steady_table.remarks(self.choice, self.failed, self.not_begun), f"The machine: {about}"]

    def show(self, console: Console) -> None:
        for table in self.tables():
            console.print(table.rich())
        for remark in self.remarks():
            console.print(remark, highlight=False)

    def markdown(self) -> str:
        return "\n\n".join([*(table.markdown() for table in self.tables()), *self.remarks()]) + "\n"

    def json(self) -> str:
        """Every turn, for a later comparison."""
        cells = {
            result.cell.name: {
                "others_share": result.others_share,
                "programs": {side.value: asdict(each) for side, each in result.measured.items()},
                "ratios": {side.value: asdict(found) for side, found in result.ratios().items()},
            }
            for result in self.results
        }
        return json.dumps(
            {"machine": self.about, "cells": cells, "failed": self.failed, "not_begun": self.not_begun},
            indent=1,
        )


def machine() -> dict[str, Any]:
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "GPUs": torch.cuda.device_count(),
        "load before": round(os.getloadavg()[0], 1),
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="measure every cell, which takes hours")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="measure these cells alone")
    parser.add_argument("--pairs", type=int, default=10, help="turns of each program, at least [10]")
    parser.add_argument("--turn-s", type=float, default=1.0, help="seconds of a turn, at least [1]")
    parser.add_argument("--turn-steps", type=int, default=2, help="whole steps of a turn, at least [2]")
    parser.add_argument(
        "--cell-s", type=float, default=20.0, help="seconds of turns in a cell, at least [20]"
    )
    parser.add_argument("--minutes", type=float, help="no cell begins later [14; with --all at any time]")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn there")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    if args.pairs < 3 or args.turn_steps < 1 or args.turn_s < 0:
        parser.error("expected three --pairs, one of --turn-steps and --turn-s 0 at least")
    for file in filter(None, (args.markdown, args.json)):
        if not file.absolute().parent.is_dir():
            parser.error(f"expected a file in a folder that exists, found {file}")
    try:
        choice = choose(takes_all=args.all, only=args.only, gpus=torch.cuda.device_count())
    except ValueError as error:
        parser.error(str(error))
    ends = (signal.SIGTERM, signal.SIGHUP)
    for each in ends:
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    pace = Pace(turn_s=args.turn_s, least_pairs=args.pairs, least_steps=args.turn_steps, cell_s=args.cell_s)
    minutes = args.minutes if args.minutes is not None else math.inf if args.all else 14.0
    session = Session(about=machine(), choice=choice)
    try:  # the programs are ended on the way out
        session.measure(pace, 60 * minutes)
    except KeyboardInterrupt:
        return 130
    finally:
        session.show(console)  # what was measured until then
        if args.markdown:
            args.markdown.write_text(session.markdown())
        if args.json:
            args.json.write_text(session.json())
    return 1 if session.failed or session.not_begun else 0


if __name__ == "__main__":
    sys.exit(main())
