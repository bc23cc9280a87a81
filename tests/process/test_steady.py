"""Programs that train in turns: one that is stopped makes no step, and none is left over."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import processes
import pytest
import steady_measure
import steady_programs
import tcp_sent
from steady_cells import Side
from steady_measure import Pace
from steady_models import WORKLOADS
from steady_programs import Command, Ended, Program

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

# Arguments: where it writes its steps, and one that it leaves out. It has a child.
STEPPING = """
import subprocess, sys, time
subprocess.Popen(["sleep", "1000"])
with open(sys.argv[1], "w", buffering=1) as out:
    for step in range(1, 10**9):
        if step != int(sys.argv[2]):
            print(f'{{"step":{step},"time":{time.time()}}}', file=out)
        time.sleep(0.001)
"""
SENDING = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(b"x" * 123_456)
sys.stdin.read()
"""
STEADY = Path(steady_programs.__file__).with_name("steady.py")
PATIENCE_S = 240.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(script: str = STEPPING, left_out: int = 0) -> Program:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        lines = folder / "lines"
        words: list[object] = [sys.executable, "-c", script, lines, left_out]
        started.append(Program(Command(side=Side.PLAIN, workers=1, words=words, folder=folder, lines=lines)))
        return started[-1]

    yield start
    for program in started:
        program.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files, which have sockets among them: their paths must be short."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        yield Path(name)


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s in vain for {what}"
        time.sleep(0.02)


def has_made(program: Program, steps: int) -> Callable[[], bool]:
    return lambda: program.ends.read() >= steps


def running_below(folder: Path) -> list[str]:
    """Commands of processes that have a path in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text(errors="replace").replace("\0", " ")
        except OSError:  # it ended
            continue
        if str(folder) in words:
            found.append(words)
    return found


def test_a_program_makes_no_step_in_the_turn_of_another_and_goes_on_in_its_own(start):
    programs = [start(), start()]
    for program in programs:
        eventually(has_made(program, 5), "five steps")
        program.stop()
    for own, other in (programs, programs[::-1]):
        before = other.ends.read()
        turn = own.turn(0.01, 20)
        assert turn.steps >= 20
        assert other.ends.read() == before
        # Of the time in which it was stopped nothing counts.
        assert turn.seconds <= own.ends.ends_s[-1] - own.ends.ends_s[-1 - turn.steps] + 1e-6


def test_a_program_that_leaves_out_a_step_is_no_measurement(start):
    program = start(left_out=9)
    eventually(has_made(program, 20), "twenty steps")
    with pytest.raises(Ended, match="plain did not go on undisturbed"):
        program.turn(0.01, 2)


def test_a_program_that_ends_says_what_it_printed(start):
    program = start("raise SystemExit('no room for the model')")
    with pytest.raises(Ended, match=r"plain ended with 1:\nno room for the model"):
        eventually(lambda: program.check(float("inf")), "its end")


def test_a_kernel_that_does_not_let_us_look_costs_the_count_alone(start, monkeypatch, capsys):
    """The number of a system call that no kernel has stands for one that a container forbids."""
    monkeypatch.setattr(tcp_sent, "_PIDFD_GETFD", 99_999)
    script = f"import socket; server = socket.create_server(('127.0.0.1', 0)){STEPPING}"
    program = start(script)
    eventually(has_made(program, 5), "five steps")
    program.stop()
    pace = Pace(turn_s=0.01, least_pairs=2, least_steps=2, cell_s=0.0)
    assert steady_measure._sent_bytes(program, pace) is None
    assert "bytes that are sent are not counted: " in capsys.readouterr().err
    program.turn(0.01, 2)


def test_a_program_with_a_worker_more_is_no_measurement(start):
    """A second generation of ours, as after a fault, or a process that is no worker."""
    program = start()
    program._num_workers = 2
    with pytest.raises(Ended, match="plain: expected 2 workers, found 1"):
        program.peak_bytes()


def test_a_program_that_is_stopped_ends_with_its_children(start):
    program = start()
    eventually(has_made(program, 5), "five steps")
    program.stop()
    (own,) = program.workers()
    child, _ = processes.family(own)
    program.close()
    eventually(lambda: not Path(f"/proc/{child}").exists() or is_zombie(child), "the end of the child")


def is_zombie(pid: int) -> bool:
    """An orphan that ended stays one where the first process of the machine collects none."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_bytes_are_counted_as_the_kernel_sends_them():
    """A process sends some over TCP to this one, which sends none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = [sys.executable, "-c", SENDING, str(server.getsockname()[1])]
        with subprocess.Popen(words, stdin=subprocess.PIPE) as sender:
            connection, _ = server.accept()
            received = 0
            while received < 123_456:
                received += len(connection.recv(1 << 16))
            assert tcp_sent.sent_bytes(sender.pid) == 123_456
            assert tcp_sent.sent_bytes(os.getpid()) == 0
            connection.close()
            sender.kill()


def test_a_cell_is_measured_and_shown(tmp_path, folder):
    """Of two workers, whose messages the kernel counts: each sends about the gradients once."""
    name = "mlp64-2w-1s-fp32"
    pace = ["--pairs", "3", "--turn-s", "0.2", "--turn-steps", "20", "--cell-s", "0"]
    files = ["--json", str(tmp_path / "json"), "--markdown", str(tmp_path / "markdown")]
    done = subprocess.run(
        [sys.executable, STEADY, "--only", name, *pace, *files],
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "MLP, hidden 64, 2 workers, 1 shard each" in done.stdout
    found = json.loads((tmp_path / "json").read_text())
    assert found["failed"] == found["not_begun"] == []
    gradients = WORKLOADS["mlp64"].gradient_bytes()
    for program in found["cells"][name]["programs"].values():
        assert len(program["turns"]) == 3
        # The first and the last step that are counted may be counted in part.
        assert 0.9 * gradients < program["sent_bytes"] < 1.5 * gradients
        assert program["peak_bytes"] > 100e6
    assert "DDP" in (tmp_path / "markdown").read_text()
    assert not running_below(folder)
    # The last of them is of torch, which the benchmark itself imports.
    assert {each.name.partition("_")[0] for each in folder.iterdir()} <= {"torchinductor"}


def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(tmp_path):
    words = [sys.executable, STEADY, "--only", "gpt-*", "--json", str(tmp_path / "missing" / "json")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected a file in a folder that exists" in done.stderr


def test_a_benchmark_that_is_told_to_end_leaves_no_program_behind(folder):
    """And it says what it has not measured."""
    command = [sys.executable, STEADY, "--only", "mlp64-1w-8s-fp32", "--pairs", "100000"]
    command += ["--markdown", str(folder / "markdown")]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(folder)}) as benchmark:
        try:
            eventually(lambda: [*folder.glob("*/ours/run/metrics.jsonl")], "the first step of ours")
            assert running_below(folder)
            benchmark.send_signal(signal.SIGTERM)
            assert benchmark.wait() == 143
        finally:
            benchmark.kill()
    eventually(lambda: not running_below(folder), "the end of all programs")
    assert (
        "Not measured, as the time was up or a signal came: mlp64-1w-8s-fp32"
        in (folder / "markdown").read_text()
    )
