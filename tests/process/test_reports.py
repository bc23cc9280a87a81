"""`run.on_step` and `--tensorboard` report each step that counts once, whatever breaks, and change
nothing; `--http` and `watch` show the run while it trains.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from urllib.request import urlopen

import pytest
import run_records
from page_server import COMMAND
from watched import shown

STEPS = 24  # of the recipe


def reports(drill):
    return run_records.lines(drill.run.local / "reports.jsonl")


@pytest.fixture
def tracked(recipes):
    return recipes / "tracked.py"


@pytest.fixture
def start(drill, tracked):
    def start(ways, *options):
        return drill.start(*options, recipe=tracked, env={"TRACKED": ways})

    return start


def board(folder):
    """What TensorBoard shows of the folder's one run, once that is there."""
    runs = [*folder.iterdir()] if folder.exists() else []
    assert len(runs) <= 1
    return shown(runs[0]) if runs else {"loss": []}


def page(where, name):
    with urlopen(f"http://{where}/{name}", timeout=30) as answer:
        return answer.read().decode()


def watch(run, typed):
    """In a terminal, whose text a file gets."""
    words = shlex.join([sys.executable, "-c", COMMAND, "watch", str(run)])
    script = ["script", "--quiet", "--return", "--flush", "--command", words, str(typed)]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    return subprocess.Popen(script, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env)


def test_each_step_is_reported_once_through_two_faults(drill, start, tmp_path):
    """The second kill comes before the steps that the first one cost are done again: then only an
    older file of metrics shows how far the run had come. It is one recovery, which `--http` counts,
    and `watch` in a real terminal follows the run to its end.
    """
    drill.shut(9, 10, 13, 16)
    folder, typed = tmp_path / "board", tmp_path / "terminal"
    options = ("--snapshot-every", "off", "--save-every", "8steps", "--http", "127.0.0.1:0")
    agent = start("file", *options, "--tensorboard", str(folder))
    drill.stands(9, ranks=1)
    where = re.search(r"metrics of this agent: http://(\S+)/metrics", agent.output)[1]
    drill.happens("checkpoint_committed", step=8)
    drill.open(9)
    drill.stands(10, ranks=1)
    (drill.gates / "go-10").touch()
    drill.stands(13, ranks=1)
    for path in drill.gates.glob("*-10*"):
        path.unlink()
    drill.shut(10)
    drill.waits_for(lambda: [s for s, _ in board(folder)["loss"]] == [*range(1, 13)], "the steps before")
    drill.kill_worker(0, generation=1)
    drill.happens("worker_started", generation=2)
    drill.stands(10, ranks=1)
    drill.kill_worker(0, generation=2)
    drill.open(10)
    drill.open(13)
    counted = re.compile(r'^elastic_recoveries_total\{.*cause="failure".*\} 1\.0$', re.MULTILINE)
    drill.waits_for(lambda: counted.search(page(where, "metrics")), "the recovery")
    assert page(where, "healthz") and page(where, "readyz") == "ok: generation 3\n"
    with watch(drill.run.local, typed) as watched:
        drill.waits_for(lambda: typed.exists() and "15 of 24" in typed.read_text(), "the newest step")
        assert "running" in typed.read_text()
        drill.open(16)
        agent.ends_with(0)
        assert watched.wait() == 0
    assert "finished after step 24" in typed.read_text() and "24 of 24" in typed.read_text()
    assert sum(steps for (steps,) in drill.values("restored", "lost_steps")) >= 4
    found = reports(drill)
    assert [each["step"] for each in found] == list(range(1, STEPS + 1))
    lines = run_records.lines(drill.run.metrics)
    for each, line in zip(found, lines, strict=True):
        assert (each["loss"], each["chain"], each["rate"]) == (line["loss"], line["chain"], line["rate"])
    assert {each["in_generation"] for each in found} == {1, 3}
    seen = board(folder)
    for tag, name in (("loss", "loss"), ("rate", "rate"), ("elastic/step_seconds", "seconds")):
        assert seen[tag] == [(line["step"], pytest.approx(line[name])) for line in lines]
    assert [step for step, _ in seen["elastic/world_size"]] == list(range(1, STEPS + 1))


def test_functions_change_no_bit_and_no_check_names_them(drill, drills, tracked, tmp_path):
    """One draws from every generator, makes unseeded ones and keeps things; one raises, which is
    shown once.
    """
    plain = drills(tmp_path / "plain")
    plain.start(recipe=tracked).ends_with(0)
    agent = drill.start("--nproc-per-node", "2", recipe=tracked, env={"TRACKED": "draw file fail"})

    agent.ends_with(0)

    (calm,), (found,) = (each.values("run_finished", "digest") for each in (plain, drill))
    assert found == calm
    assert len(reports(drill)) == STEPS
    assert agent.output.count("ConnectionError: no tracker answers at step 1\n") == 1
    assert drill.values("on_step_failed", "step", "function") == [(1, "fail")]
    assert "note:" not in agent.output


def test_a_function_that_steers_the_run_is_refused(start):
    """It catches that run.evaluate refuses it, and changes the State then."""
    agent = start("steer", "--nproc-per-node", "2")
    agent.ends_with(2)
    assert "run.evaluate was called by a function of run.on_step" in agent.output
    assert "changed the State at step 1: rank 0 alone calls it" in agent.output


def test_a_step_whose_line_another_node_has_is_reported_later(drill, tracked):
    """Rank 0 dies between the sums of step 9 and its line; the other node finishes that step."""
    drill.shut(9, 10)
    options = ("--save-every", "100000steps", "--snapshot-every", "1", "--keep-alive", "10min")
    agents = [
        drill.start(
            *options,
            *("--max-nodes", "2", "--last-call", "10min", "--faults", "step 9 rank 0 optimizer: kill"),
            recipe=tracked,
            env={"TRACKED": "file"},
        )
        for _ in range(2)
    ]
    drill.stands(9, ranks=2)
    other = drill.agent_of_rank(1, generation=1)
    other.signal(signal.SIGSTOP)
    drill.open(9)
    drill.waits_for((drill.gates / "at-10-rank1").exists, "rank 1 before step 10")
    other.signal(signal.SIGCONT)
    drill.happens("restored", generation=2, step=9)
    drill.open(10)
    for agent in agents:
        agent.ends_with(0)

    assert [line["step"] for line in run_records.lines(drill.run.metrics)] == list(range(1, STEPS + 1))
    found = [(each["step"], each["in_generation"]) for each in reports(drill)]
    assert found == [(step, 1 if step < 9 else 2) for step in range(1, STEPS + 1)]
