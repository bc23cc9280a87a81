"""Nodes that share nothing but the URL of an object store are one run: they meet and save in it."""

import signal
from contextlib import chdir
from itertools import cycle

import pytest
import run_records
from faulty_storage import Deed
from gates import wait_for
from page_server import served

from elastic.config.run_dir import RunDir

STEPS = 24


class Machines:
    """Machines with a working directory each, and one run in an object store."""

    def __init__(self, folder, drills, url):
        self.url = url
        self._folder = folder
        self._drills = drills
        self.all = drills(folder / "all")  # they share the gates, and nothing of the run
        self._machines = []

    def start(self, *options):
        """Start an agent on a machine of its own."""
        machine = self._drills(self._folder / f"machine-{len(self._machines)}")
        self._machines.append(machine)
        machine.gates = self.all.gates
        machine.run = RunDir.parse(self.url)
        # Long enough for nodes on one busy machine; the default is 15 s in an object store.
        started = machine.start("--snapshot-every", "1", "--keep-alive", "6s", *options)
        self.all.agents.append(started)
        return started

    def events(self, name, **fields):
        """All events that the machines have written so far."""
        folders = [path for machine in self._machines for path in machine.folder.glob("runs/*/events")]
        found = [event for folder in folders for event in run_records.events(folder)]
        return run_records.matching(found, name, **fields)

    def happens(self, name, **fields):
        return self.all.waits_for(lambda: next(iter(self.events(name, **fields)), None), f"{name} {fields}")

    def agent_of_rank(self, rank, generation):
        node = self.happens("worker_started", rank=rank, generation=generation)["node"]
        own = f"runs/*/events/{node}-agent.jsonl"
        return next(machine.agents[0] for machine in self._machines if any(machine.folder.glob(own)))

    def inspects(self, *words):
        """Exit code and JSON of a command, run in a folder that no agent has seen."""
        elsewhere = self._folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        with chdir(elsewhere):
            found = self.all.inspects(*words)
        assert not list(elsewhere.iterdir())
        return found

    def shows(self, command, condition, what):
        """Wait until enough is uploaded for it: a disk that is lost takes the other lines along."""

        def is_uploaded():
            return condition(self.inspects(command, self.url)[1])

        wait_for(is_uploaded, f"{what} in the store", poll_s=1.0)  # each look downloads

    def is_like(self, undisturbed):
        """By the store alone. Returns the report."""
        self._machines[-1].is_like(undisturbed)
        return self.inspects("report", self.url)[1]


@pytest.fixture
def machines(tmp_path, drills, s3_bucket):
    return Machines(tmp_path / "machines", drills, f"{s3_bucket}/run")


def test_nodes_die_one_by_one_and_another_machine_resumes(machines, undisturbed, recipes):
    """SIGKILL to the agent of rank 0 before step 10, whose disk is lost with all lines that it had
    not uploaded. Then to the other one before step 15, with checkpoints of steps 4 and 12. Another
    machine, which never saw the run, resumes from the newest. Plain python, without an agent,
    begins another run from it in the end. elastic-train reads both from elsewhere.
    """
    machines.all.shut(5, 10, 13, 15)
    options = ("--max-nodes", "2", "--last-call", "10min", "--keep", "9", "--max-restarts", "0")
    agents = [machines.start(*options) for _ in range(2)]
    machines.all.stands(5, ranks=2)
    machines.happens("checkpoint_committed", step=4)
    machines.all.open(5)
    machines.all.stands(10, ranks=2)
    machines.shows("report", lambda found: found["generations"], "generation 1")
    doomed = machines.agent_of_rank(0, generation=1)
    (other,) = (agent for agent in agents if agent is not doomed)
    doomed.signal(signal.SIGKILL)
    machines.happens("generation_started", generation=2)
    machines.all.open(10)
    machines.all.stands(13, ranks=1)
    machines.happens("checkpoint_committed", step=12)
    machines.all.open(13)
    machines.all.stands(15, ranks=1)
    machines.shows("status", lambda found: found["step"] == 14, "step 14")
    other.signal(signal.SIGKILL)
    other.wait()
    machines.all.open(15)
    code, found = machines.inspects("verify", machines.url)
    assert (code, found["damage"]) == (0, []) and found["committed"][-1] == 12
    machines.start().ends_with(0)

    report = machines.is_like(undisturbed)
    first, last = report["recoveries"]
    assert (first["cause"], first["lost_steps"], last["source"]) == ("node lost", 0, "checkpoint")
    assert report["lost_steps"] == 2
    assert [one["world_size"] for one in report["generations"]] == [2, 1, 1]

    second = f"{machines.url}-second"
    env = {"ELASTIC_RUN_DIR": second, "ELASTIC_FROM": f"{machines.url}@{STEPS}:ema,model"}
    machines.all.start_script(recipes / "tiny.py", "--global-batch", "64", env=env).ends_with(0)
    report = machines.inspects("report", second)[1]
    assert (report["finished"], report["steps"]) == (True, STEPS // 2)
    (ancestor,) = report["lineage"]
    assert (ancestor["step"], ancestor["digest"]) == (STEPS, undisturbed.digest)
    with served(second) as server:
        assert f"Finished: {STEPS // 2} steps".encode() in server.ask()[2]


def test_a_store_that_is_away_for_a_while_stops_no_step(machines, undisturbed, storage):
    """From step 6 to step 14 every request fails, by turns in two ways. The steps between are
    trained all the same.
    """
    machines.all.shut(6, 14)
    agent = machines.start()
    machines.all.stands(6, ranks=1)
    turns = cycle([True, False])
    faults = [storage.fail(Deed.ERROR, lambda *_: next(turns)), storage.fail(Deed.SLOW_DOWN, lambda *_: True)]
    machines.all.waits_for(lambda: "the rendezvous did not answer" in agent.output, "the failure being said")
    machines.all.open(6)
    machines.all.stands(14, ranks=1)
    storage.heal()
    assert all(fault.struck for fault in faults)
    machines.all.waits_for(lambda: "answers again" in agent.output, "the store being back")
    machines.all.open(14)
    agent.ends_with(0)
    assert machines.is_like(undisturbed)["lost_steps"] == 0
