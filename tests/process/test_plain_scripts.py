"""A script that does not use this library runs under elastic-train, and under torchrun with our
rendezvous; a recipe runs without elastic-train.
"""

import json
import signal

import pytest
import run_records
import torch.distributed.run

from elastic.checkpoint.catalog import list_commits
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock

TORCHRUN = torch.distributed.run.__file__


def test_a_plain_script_gets_torchruns_variables_and_restarts(drill, recipes):
    """Rank 1 kills itself after the first collective of its first life."""
    agent = drill.start("--nproc-per-node", "2", recipe=recipes / "plain.py", env={"PLAIN_DIES": "1"})
    agent.ends_with(0)

    seen = [
        json.loads(drill.run.log(generation=2, rank=rank).read_text().splitlines()[-1]) for rank in (0, 1)
    ]
    same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    same |= {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "ROLE_NAME": "default"}
    for rank, variables in enumerate(seen):
        assert {variables[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")} == {str(rank)}
        assert variables.items() >= same.items() and variables["total"] == 3.0
        assert variables["MASTER_ADDR"] and int(variables["MASTER_PORT"]) > 0
    first, *_, last = agent.output.splitlines()
    assert "plain.py does not import elastic: it runs as under torchrun. Only restarts protect it" in first
    assert last.startswith("complete; ")
    assert drill.inspects("status", drill.run.url)[1]["state"] == "finished"
    again = drill.start("--nproc-per-node", "2", recipe=recipes / "plain.py")
    again.ends_with(0)
    assert "this command has ended well" in again.output
    assert "--from" not in again.output
    report = drill.inspects("report", drill.run.url)[1]
    assert (report["finished"], report["goodput"], report["final_digest"]) == (True, None, None)
    assert report["plain"]["restarts"] == {"failure": 1}
    assert report["plain"]["last_exit"] == "exit code 0"


USAGE = """
import argparse, elastic
elastic.start(seed=0, global_batch=8, shards=8)
argparse.ArgumentParser().parse_args()
"""


@pytest.mark.parametrize(
    ("text", "code", "says", "generations"),
    [
        (USAGE, 2, "usage: recipe.py [-h]", 1),
        # A worker with this library means by it that it drained.
        ("import sys\nsys.exit(75)\n", 1, "that was failure 2, and --max-restarts is 1", 2),
    ],
    ids=["argparse", "75"],
)
def test_the_exit_code_of_a_script_means_what_it_means_there(drill, text, code, says, generations):
    """argparse ends a script with exit code 2, once it has said why; here in a worker."""
    recipe = drill.folder / "recipe.py"
    recipe.write_text(text)
    agent = drill.start("--max-restarts", "1", "--nproc-per-node", "1", recipe=recipe, arguments=("--wrong",))
    agent.ends_with(code)
    assert says in agent.output
    assert code != 2 or "its words are above" in agent.output.splitlines()[-1]
    assert code != 2 or "Traceback" not in agent.output
    assert len(drill.events("generation_started")) == generations


def test_joins_and_deaths_use_no_restart_of_a_script(drill, recipes):
    """No restart is allowed. The ranks add numbers all the time, so those of the other node break
    when one node dies. The other one is told to leave in the end.
    """
    options = ("--max-nodes", "2", "--last-call", "0s", "--max-restarts", "0")
    options += ("--nproc-per-node", "1")  # else each agent starts an interpreter that counts GPUs

    def joins(generation):
        env = {"PLAIN_SUMS": str(drill.folder / "enough")}
        started = drill.start(*options, recipe=recipes / "plain.py", env=env)
        drill.happens("worker_started", rank=generation - 1, generation=generation)
        return started

    leaver, doomed = joins(1), joins(2)
    doomed.signal(signal.SIGKILL)
    drill.happens("worker_started", rank=0, generation=3)
    leaver.signal(signal.SIGTERM)
    leaver.ends_with(1)
    assert "the script was stopped, and whatever it saved is its own" in leaver.output
    assert "SIGTERM, stopped by this agent" in leaver.output
    assert "first step" not in leaver.output

    generations = drill.values("generation_started", "world_size", "cause", "restarts")
    assert generations == [(1, "start", 0), (2, "node joined", 0), (1, "node lost", 0)]


def test_plain_python_drains_and_torchrun_goes_on_alike(drill, undisturbed, recipes):
    """Ctrl-C under `python recipe.py` in step 10; the run is then finished by two workers of
    `torchrun recipe.py`.
    """
    env = {"ELASTIC_RUN_DIR": drill.run.url}
    recipe = recipes / "tiny.py"
    drill.shut(10)
    alone = drill.start_script(recipe, env=env)
    drill.stands(10, ranks=1)
    alone.signal(signal.SIGINT)
    drill.waits_for(lambda: "stopping after this step" in alone.output, "the answer to Ctrl-C")
    drill.open(10)
    alone.ends_with(75)
    assert drill.last_step == 10
    assert alone.output.count("interrupted; step 10 is saved in") == 1
    drill.start_script(TORCHRUN, "--standalone", "--nproc-per-node", "2", str(recipe), env=env).ends_with(0)

    lines = run_records.lines(drill.run.metrics)
    assert [line["chain"] for line in lines] == undisturbed.chains
    assert [line["world_size"] for line in lines] == [1] * 10 + [2] * 14
    records, damage = list_commits(open_store(drill.run.checkpoints_url), SystemClock())
    assert (records[0].step, records[0].digest, damage) == (24, undisturbed.digest, [])


def test_torchrun_admits_a_newcomer(drill, recipes):
    """One agent trains alone and a second joins. Both end with success."""
    until = drill.folder / "enough"
    options = ["--rdzv-backend=elastic", f"--rdzv-endpoint={drill.folder / 'rendezvous'}", "--rdzv-id=job"]
    options += ["--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1"]
    options += ["--rdzv-conf=last_call_timeout=0,keep_alive=20", str(recipes / "plain.py")]
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PLAIN_SUMS": str(until)}

    def joins(rank, world_size):
        agent = drill.start_script(TORCHRUN, *options, env=env)
        mark = until.with_name(f"enough-{rank}-of-{world_size}")
        drill.waits_for(mark.exists, "a worker that adds numbers")
        return agent

    agents = [joins(0, 1), joins(1, 2)]
    until.touch()
    for agent in agents:
        agent.ends_with(0)
        assert json.loads(agent.output.splitlines()[-1])["WORLD_SIZE"] == "2"
    newest = max((drill.folder / "rendezvous" / "job").glob("state-*"))
    assert json.loads(newest.read_text())["ended"] == {"exit_code": 0, "reason": "complete"}
