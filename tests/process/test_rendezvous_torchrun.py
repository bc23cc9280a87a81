"""Plain torchrun agents with our rendezvous: real processes, a real collective, a real SIGKILL."""

import json

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def test_torchrun_admits_a_newcomer_and_survives_a_killed_worker(drill, recipes):
    """One agent trains alone and a second joins, whose worker is killed in its first life. Both
    agents end with success.
    """
    until = drill.folder / "enough"
    options = ["--rdzv-backend=elastic", f"--rdzv-endpoint={drill.folder / 'rendezvous'}", "--rdzv-id=job"]
    options += ["--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1"]
    options += ["--rdzv-conf=last_call_timeout=0,keep_alive=20", str(recipes / "plain.py")]
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PLAIN_SUMS": str(until), "PLAIN_DIES": "1"}

    def joins(rank, world_size, life):
        agent = drill.start_torchrun(*options, env=env)
        mark = until.with_name(f"enough-{rank}-of-{world_size}-life-{life}")
        drill.waits_for(mark.exists, "a worker that adds numbers")
        return agent

    agents = [joins(0, 1, life=0), joins(1, 2, life=1)]
    until.touch()
    for agent in agents:
        agent.ends_with(0)
        assert json.loads(agent.output.splitlines()[-1])["WORLD_SIZE"] == "2"
    newest = max((drill.folder / "rendezvous" / "job").glob("state-*"))
    assert json.loads(newest.read_text())["ended"] == {"exit_code": 0, "reason": "complete"}
