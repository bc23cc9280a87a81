"""What it costs training to be watched: `/metrics` scraped once a second, TensorBoard on, and the
page of `serve` asked for every two seconds, as an open browser does.

python benchmarks/watching.py [--world 2] [--samples 8] [--pairs 40] [--window-s 5] [--scrape-s 1]

Two runs of the same recipe live at once, one watched and one not, and one of them is always
stopped (SIGSTOP): they train in turns of a few seconds. Neighbouring turns make a pair, so that
whatever else the machine does hits both, and the figure of a turn is its mean step, in which each
interruption counts. The last lines are the median of the ratios of the pairs with its standard
error, and the processor time of the agent beyond that of the one that is not watched, and of
`serve`, as shares of one core. What a scrape costs the client is a part of the ratio, because it
runs on the same machine.
"""

import argparse
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import processes
from paired_turns import in_order, ratio, whole_steps
from steady_programs import BIN, HERE

from elastic.observe import metrics

ADDRESS = re.compile(r"metrics of this agent: http://([\d.]+):(\d+)")
PAGE = re.compile(r"is at http://([\d.]+):(\d+)")
WARM_UP = 10
STEPS, EPOCHS = 200, 1000  # no run comes to its end
POLL_S = 2.0  # of the page


class Training:
    """A run that can be stopped and goes on as if nothing had been."""

    def __init__(self, args: argparse.Namespace, folder: Path, *options: str) -> None:
        self.folder, self.printed = folder / "run", folder / "printed"
        words = [
            "--rehearse",
            "off",
            "--run-dir",
            self.folder,
            "--nproc-per-node",
            args.world,
            "--save-every",
            "1000000steps",
        ]
        recipe = ["--", args.world, args.samples, STEPS, EPOCHS]
        with self.printed.open("w") as out:
            command = [BIN / "elastic-train", HERE / "resnet_ours.py", *words, *options, *recipe]
            self.agent = subprocess.Popen(
                [*map(str, command)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=out,
            )
        self.others: list[subprocess.Popen[str]] = []
        self.agent_s = self.serve_s = 0.0

    @property
    def watchers(self) -> list[int]:
        """The agent, and `serve`."""
        return [self.agent.pid, *(each.pid for each in self.others)]

    def wait_for_step(self, step: int) -> None:
        while (newest := metrics.newest(self.folder / "metrics.jsonl")) is None or newest.step < step:
            if self.agent.poll() is not None:
                sys.exit(f"the run ended:\n{self.printed.read_text()}")
            time.sleep(0.1)

    def serve(self) -> tuple[str, int]:
        server = subprocess.Popen(
            [BIN / "elastic-train", "serve", self.folder, "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.others.append(server)
        assert server.stdout is not None
        return address(PAGE, server.stdout.readline())

    def send(self, number: signal.Signals) -> None:
        processes.send([*processes.family(self.agent.pid), *self.watchers[1:]], number)

    def mean_step_s(self, began_s: float, ended_s: float) -> float:
        """Of the steps that lie in a turn whole. Seconds since 1970."""
        lines = metrics.newest_lines(self.folder / "metrics.jsonl")
        found = whole_steps([line.time or 0.0 for line in lines], began_s, ended_s)
        if found is None or found.steps < 5:
            sys.exit("expected five steps in a turn at least; take a longer --window-s")
        return found.step_s


def address(pattern: re.Pattern[str], text: str) -> tuple[str, int]:
    found = pattern.search(text)
    assert found is not None, text
    return found[1], int(found[2])


def get(place: tuple[str, int], path: str) -> bytes:
    with socket.create_connection(place, timeout=10) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {place[0]}\r\n\r\n".encode())
        found = b""
        while part := connection.recv(1 << 20):
            found += part
    assert found.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200")), found[:200]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8, help="samples a shard")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--window-s", type=float, default=5.0, help="seconds of a turn")
    parser.add_argument("--scrape-s", type=float, default=1.0, help="seconds from scrape to scrape")
    args = parser.parse_args()
    if args.pairs < 3:
        parser.error(f"expected three --pairs at least, found {args.pairs}")
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / "plain", Path(name) / "watched"]
        for folder in folders:
            folder.mkdir()
        plain = Training(args, folders[0])
        watched = Training(args, folders[1], "--http", "127.0.0.1:0", "--tensorboard", f"{name}/board")
        try:
            measure(args, plain, watched)
        finally:
            for each in (plain, watched):
                if each.agent.poll() is None:
                    each.send(signal.SIGKILL)


def measure(args: argparse.Namespace, plain: Training, watched: Training) -> None:
    for each in (plain, watched):
        each.wait_for_step(WARM_UP)
    scraped, page = address(ADDRESS, watched.printed.read_text()), watched.serve()
    for each in (plain, watched):
        each.send(signal.SIGSTOP)
    scrapes = 0

    def turn(own: Training) -> float:
        nonlocal scrapes
        own.send(signal.SIGCONT)
        began_s = time.time()
        next_s = dict.fromkeys(("scrape", "page"), time.monotonic())
        before = [processes.processor_s(pid) for pid in own.watchers]
        until_s = time.monotonic() + args.window_s
        while (now_s := time.monotonic()) < until_s:
            if own is watched and now_s >= next_s["scrape"]:
                scrapes += b"elastic_steps_total" in get(scraped, "/metrics")
                next_s["scrape"] += args.scrape_s
            if own is watched and now_s >= next_s["page"]:
                get(page, "/picture.json")
                next_s["page"] += POLL_S
            time.sleep(0.1)
        ended_s = time.time()
        after = [processes.processor_s(pid) for pid in own.watchers]
        own.send(signal.SIGSTOP)
        taken = [end - begin for begin, end in zip(before, after, strict=True)]
        own.agent_s += taken[0]
        own.serve_s += sum(taken[1:])
        return own.mean_step_s(began_s, ended_s)

    watched_s, plain_s = [], []
    for number in range(args.pairs + 1):
        order = in_order((watched, plain), number)
        turns = {each: turn(each) for each in order}
        if number == 0:  # libraries are imported, and files read
            for each in order:
                each.agent_s = each.serve_s = 0.0
            continue
        watched_s.append(turns[watched])
        plain_s.append(turns[plain])
    for each in (plain, watched):
        if each.agent.poll() is not None or "generation 2" in each.printed.read_text():
            sys.exit(f"a run did not go on undisturbed:\n{each.printed.read_text()}")
    seconds = args.pairs * args.window_s
    found = ratio(watched_s, plain_s)
    print(
        f"ResNet-18 32x32, {args.samples} samples a shard, world {args.world}, {statistics.median(plain_s) * 1e3:.1f} ms a step,"
        f" {args.pairs} pairs of turns of {args.window_s:g} s, {scrapes} scrapes, load of the machine {os.getloadavg()[0]:.1f}"
    )
    print(
        f"watched: a step takes {found.median:.4f} times as long (standard error {found.error:.4f}, half of the pairs"
        f" from {found.lower:.3f} to {found.upper:.3f}); the agent takes {(watched.agent_s - plain.agent_s) / seconds:.2%}"
        f" of a core more, and serve {watched.serve_s / seconds:.2%}"
    )


if __name__ == "__main__":
    main()
