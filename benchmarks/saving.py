"""What a checkpoint costs beside plain reads and writes of the same bytes, in one run.

python benchmarks/saving.py [--layers 6] [--width 4096] [--turns 5] [--saves 20] [--parts]

The state is that of an MLP with Adam (6 layers of 4096 x 4096: 1.2 GB). In each turn:

- `copy`: a snapshot into a slot, beside NumPy's copy of the same tensors;
- `save`: from the offer to the commit, beside a write of the same bytes with fsync;
- `save in parts`: the same state in two parts, by the uploaders of two nodes, beside two processes
  that write and sync the same bytes at once;
- `verify` and `read`, which keeps the state in memory for all ranks of a machine, beside a plain
  read that keeps nothing, of a file that lies on the disk alone, and of one in the page cache; and
  beside a plain read into fresh memory;
- `step`: the steps of a small MLP in another process while a save went on, beside those right
  before and after it, in each of the last `--saves` saves.

A save and its twin take turns, so that other load on the machine hits each alike; the table shows
medians with the range, and the median of the ratios with its standard error. The trainer runs
beside the last saves alone, on one processor. `chrt -f 50` before the command keeps other programs
away; the trainer then runs above it.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired_turns import ratio
from rich.console import Console
from rich.table import Table
from torch import Tensor

from elastic.checkpoint.catalog import list_commits
from elastic.checkpoint.payload_check import read_state
from elastic.config.run_dir import RunDir
from elastic.report.commands import verify_run
from elastic.snapshot import image
from elastic.snapshot.slots import Snapshot, SnapshotInfo, SnapshotPart, SnapshotSlots
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock
from elastic.train.state.flat import FlatState
from elastic.uploader.client import UploaderProcess, offer
from elastic.uploader.protocol import UploaderConfig

CHUNK_BYTES = 1 << 22
WINDOW_S = 2.0  # of steps before a save, and of those after it
DISK_SETTLE_S = 4.0  # a disk that has just freed or written as much is slower
SETTLE_S = 0.5  # after a copy, before the steps count
LIMIT_S = 300.0
NODES = 2
TWINS = {
    "copy": "numpy copy",
    "save": "write and fsync",
    "save in parts": "two writes and fsyncs at once",
    "verify": "read from the disk",
    "verify, cached": "read from the cache",
    "read": "read from the disk",
    "read, cached": "read into memory",
    "step": "steps before and after",
    "save beside training": "write and fsync",
}


def state(layers: int, width: int) -> dict[str, Tensor]:
    names = (f"{kind}.{number}" for kind in ("model", "exp_avg", "exp_avg_sq") for number in range(layers))
    return {name: torch.randn(width, width) for name in names}


def timed(call: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def train(stop: Any, answers: Connection) -> None:
    """Until `stop`; sends (begin, seconds) of each step."""
    torch.set_num_threads(1)
    with suppress(PermissionError):
        if os.sched_getscheduler(0) == os.SCHED_FIFO:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(60))
    answers.send("ready")
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    optimizer, batch, steps = torch.optim.Adam(model.parameters()), torch.randn(256, 1024), []
    while not stop.is_set():
        began_s = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        steps.append((began_s, time.perf_counter() - began_s))
    answers.send(steps)


class Bench:
    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self.folder = folder
        self.tensors = tensors
        self.layout = image.layout(tensors, {"state": {"model": {}, "optimizer": {}}, "step": 1})
        self.slots = SnapshotSlots.create(self.layout.size_bytes, 1)
        self.run = RunDir.parse(str(folder / "run"))
        self.run.events.mkdir(parents=True)
        config = UploaderConfig(run_url=self.run.url, scratch=str(folder), run_id="r", node="n", keep=1)
        self.process = UploaderProcess(config)
        self.window = 0.0, 0.0  # of the last save
        flat = FlatState(tensors=tensors, document={"model": {}, "optimizer": {}})
        self.parts = [flat.part(number, NODES) for number in range(NODES)]
        self.nodes = []
        for number in range(NODES):
            scratch = folder / str(number)
            scratch.mkdir()
            slots = SnapshotSlots.create(int(self.layout.size_bytes / NODES * 1.1) + (1 << 20), 1)
            uploader = UploaderProcess(replace(config, scratch=str(scratch), node=f"n{number}"))
            self.nodes.append((slots, uploader))

    def turn(self, step: int) -> dict[str, tuple[float, float]]:
        """Seconds, and those of the twin."""
        spare = np.empty(max(tensor.numel() for tensor in self.tensors.values()), dtype=np.float32)
        snapshot, copy_s = self._snapshot(step)
        flat = [each.numpy().ravel() for each in self.tensors.values()]
        found = {"copy": (copy_s, timed(lambda: [np.concatenate([each], out=spare) for each in flat]))}
        plain = self.folder / "whole"
        write_s = timed(lambda: write_plainly(plain, snapshot, self.slots))
        plain.unlink()  # both find the memory of the page cache as the other left it
        found["save"] = (self._save(snapshot), write_s)
        payload = next((self.folder / "run" / "checkpoints").rglob("*.safetensors"))
        for suffix in ("", ", cached"):
            times = []
            for call in (
                self._verify,
                self._read,
                lambda: read_plainly(payload),
                lambda: read_whole(payload),
            ):
                if not suffix:
                    forget(payload)
                times.append(timed(call))
            found[f"verify{suffix}"] = (times[0], times[2])
            found[f"read{suffix}"] = (times[1], times[3] if suffix else times[2])
        found["save in parts"] = self.save_in_parts(step)
        return found

    def beside_training(self, step: int) -> tuple[float, float]:
        """When a save beside training began and ended."""
        snapshot, _ = self._snapshot(step)
        time.sleep(SETTLE_S + WINDOW_S)
        self._save(snapshot)
        time.sleep(WINDOW_S)
        shutil.rmtree(self.folder / "run" / "checkpoints")
        return self.window

    def close(self) -> None:
        self.process.stop()
        for _, process in self.nodes:
            process.stop()

    def _snapshot(self, step: int) -> tuple[Snapshot, float]:
        slot = self.slots.begin()
        assert slot is not None
        began_s = time.perf_counter()
        checksum = image.copy_into(self.layout, self.slots.body(slot))
        took_s = time.perf_counter() - began_s
        info = SnapshotInfo(step=step, generation=1, checksum=checksum)
        return self.slots.publish(slot, size_bytes=self.layout.size_bytes, info=info), took_s

    def _save(self, snapshot: Snapshot) -> float:
        began_s = time.perf_counter()
        path = self.process.socket_path
        result = offer(path, self.slots, snapshot, resumed_from=None, final=False).wait(LIMIT_S)
        ended_s = time.perf_counter()
        assert result is not None, "no answer"
        assert result.state == "committed", result
        self.window = began_s, ended_s
        return ended_s - began_s

    def save_in_parts(self, step: int) -> tuple[float, float]:
        """Seconds, and those of processes that write the same bytes."""
        offers = []
        shutil.rmtree(self.folder / "run" / "checkpoints", ignore_errors=True)
        for number, ((slots, uploader), part) in enumerate(zip(self.nodes, self.parts, strict=True)):
            laid_out = image.layout(part.tensors, part.to_json() | {"step": step})
            slot = slots.begin()
            assert slot is not None
            checksum = image.copy_into(laid_out, slots.body(slot))
            size_bytes = laid_out.size_bytes
            own = SnapshotPart(
                number=number, start=0, size_bytes=size_bytes, checksum=checksum, is_copy=False
            )
            info = SnapshotInfo(step=step, generation=1, checksum="0" * 64, of=NODES, parts=(own,))
            offers.append((uploader, slots, slots.publish(slot, size_bytes=size_bytes, info=info)))

        def saves() -> None:
            handed = [
                offer(uploader.socket_path, slots, snapshot, resumed_from=None, final=False)
                for uploader, slots, snapshot in offers
            ]
            results = [each.wait(LIMIT_S) for each in handed]
            assert all(each and each.state == "committed" for each in results), results

        def writes() -> None:
            writers = []
            (self.folder / "plain").mkdir()
            for number, (_, slots, snapshot) in enumerate(offers):
                arguments = self.folder / "plain" / f"{number}", snapshot, slots
                process = multiprocessing.get_context("fork").Process(target=write_plainly, args=arguments)
                process.start()
                writers.append(process)
            for each in writers:
                each.join()

        took_s = {}
        for call in (saves, writes)[:: 1 if step % 2 else -1]:
            took_s[call] = timed(call)
            for path in (self.folder / "run" / "checkpoints", self.folder / "plain"):
                shutil.rmtree(path, ignore_errors=True)
            os.sync()
            time.sleep(DISK_SETTLE_S)
        return took_s[saves], took_s[writes]

    def _verify(self) -> None:
        assert not verify_run(self.run, SystemClock()).damage

    def _read(self) -> None:
        store, clock = open_store(self.run.checkpoints_url), SystemClock()
        read_state(store, list_commits(store, clock)[0][0].payloads[0], clock).close()


def write_plainly(path: Path, snapshot: Snapshot, slots: SnapshotSlots) -> None:
    with path.open("xb", buffering=0) as file:
        for start in range(0, snapshot.size_bytes, CHUNK_BYTES):
            size_bytes = min(CHUNK_BYTES, snapshot.size_bytes - start)
            file.write(os.pread(slots.fd, size_bytes, slots.offset(snapshot.slot) + start))
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(CHUNK_BYTES):
            pass


def read_whole(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        file.readall()


def forget(path: Path) -> None:
    """Let the kernel drop a file's pages, so that the next read goes to the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def slowed(steps: list[tuple[float, float]], window: tuple[float, float]) -> tuple[float, float]:
    """Mean seconds of the steps during a save, and of those right before and after it."""
    began_s, ended_s = window
    during, before, after = (
        [took for at, took in steps if begin <= at and at + took <= end]
        for begin, end in (window, (began_s - WINDOW_S, began_s), (ended_s, ended_s + WINDOW_S))
    )
    if len(during) < 3:
        sys.exit(
            f"expected a save of three steps at least, found one of {ended_s - began_s:.2f} s; take more --layers"
        )
    return statistics.mean(during), (statistics.mean(before) + statistics.mean(after)) / 2


def measured(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    context = multiprocessing.get_context("spawn")
    stop, (ours, theirs) = context.Event(), context.Pipe(duplex=False)
    trainer = context.Process(target=train, args=(stop, theirs), daemon=True)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in TWINS}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        bench = Bench(Path(name), state(args.layers, args.width))
        try:
            if args.parts:
                return {"save in parts": [bench.save_in_parts(1 + turn) for turn in range(args.turns)]}
            for number in range(1, args.turns + 1):
                for each, pair in bench.turn(number).items():
                    found[each].append(pair)
            trainer.start()
            assert ours.recv() == "ready"
            windows = [bench.beside_training(args.turns + number + 1) for number in range(args.saves)]
            stop.set()
            steps = ours.recv()
        finally:
            stop.set()
            bench.close()
        found["step"] = [slowed(steps, window) for window in windows]
        found["save beside training"] = [
            (end - begin, write_s) for (begin, end), (_, write_s) in zip(windows, found["save"], strict=False)
        ]
    trainer.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--saves", type=int, default=20, help="beside training, after the turns")
    parser.add_argument("--parts", action="store_true", help="only saves in parts, on a disk at rest")
    parser.add_argument("--folder", help="on the disk to be measured; the temporary directory if not given")
    parser.add_argument("--json", type=Path, help="write all seconds there")
    args = parser.parse_args()
    if args.turns < 3 or args.saves < args.turns:
        parser.error("expected three --turns at least, and as many --saves at least")
    torch.set_num_threads(1)
    found = measured(args)
    size_bytes = 12 * args.layers * args.width**2
    table = Table("", "s", "beside", "s", "ratio", "of the turns", title=f"{size_bytes / 1e9:.2f} GB")
    for name, pairs in found.items():
        texts = [
            f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})"
            for each in zip(*pairs, strict=True)
        ]
        ratios = [ours / plain for ours, plain in pairs]
        whole = ratio(*zip(*pairs, strict=True))
        row = name, texts[0], TWINS[name], texts[1], f"{whole.median:.3f} ± {whole.error:.3f}"
        table.add_row(*row, " ".join(f"{each:.2f}" for each in ratios))
    Console(width=150).print(table)
    if args.json:
        args.json.write_text(json.dumps({"size_bytes": size_bytes, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
