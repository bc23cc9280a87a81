"""Nodes that share nothing but the URL of an object store are one run: they meet and save in it."""

import signal
from contextlib import chdir
from itertools import cycle

import pytest
import run_records
from faulty_storage import Deed, FaultyStorage
from page_server import served

from elastic.cli import main
from elastic.config.run_dir import RunDir
from elastic.report.download import readable
from elastic.storage.remote import Objects

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

TWO = ("--max-nodes", "2", "--last-call", "10min")
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
        self._words = ("--snapshot-every", "1", "--keep-alive", "6s", *options)
        self.all.agents.append(machine.start(*self._words))
        return self.all.agents[-1]

    def again(self, number):
        """Give the command of `start` once more on a machine that has the run's files."""
        self.all.agents.append(self._machines[number].start(*self._words))
        return self.all.agents[-1]

    def start_script(self, script):
        """Start the script by plain python, on a machine of its own."""
        machine = self._drills(self._folder / f"machine-{len(self._machines)}")
        self._machines.append(machine)
        machine.gates, machine.run = self.all.gates, RunDir.parse(self.url)
        self.all.agents.append(machine.start_script(script, env={"ELASTIC_RUN_DIR": self.url}))
        return self.all.agents[-1]

    def events(self, name, **fields):
        """All events that the machines have written so far."""
        folders = [path for machine in self._machines for path in machine.folder.glob("runs/*/events")]
        found = [
            event for folder in folders for event in run_records.events(folder) if event["event"] == name
        ]
        return [event for event in found if all(event.get(key) == value for key, value in fields.items())]

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

    def is_like(self, undisturbed):
        """Check from the store alone that the run is the undisturbed one: the same digest, and
        every step once, in order, with the same chain value. Returns the report.
        """
        code, report = self.inspects("report", self.url)
        assert (code, report["finished"], report["final_digest"]) == (0, True, undisturbed.digest), (
            self.all.output
        )
        with readable(RunDir.parse(self.url)) as run:
            lines = run_records.lines(run.metrics)
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert [line["chain"] for line in lines] == undisturbed.chains
        return report


@pytest.fixture
def machines(tmp_path, drills, s3_bucket):
    return Machines(tmp_path / "machines", drills, f"{s3_bucket}/run")


@pytest.fixture
def storage(s3, s3_bucket, monkeypatch):
    """The agents' storage, which fails as the test wants; `s3.environ` leads around the proxy."""
    proxy = FaultyStorage(s3.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.close()


def test_the_node_of_rank_0_dies_and_the_other_loses_none_of_its_steps(machines, undisturbed):
    """SIGKILL to the agent of rank 0 before step 10. Its disk is lost, with all lines that it had
    not uploaded.
    """
    machines.all.shut(10)
    agents = [machines.start(*TWO, "--max-restarts", "0") for _ in range(2)]
    machines.all.stands(10, ranks=2)
    doomed = machines.agent_of_rank(0, generation=1)
    (other,) = (agent for agent in agents if agent is not doomed)
    doomed.signal(signal.SIGKILL)
    machines.happens("generation_started", generation=2)
    machines.all.open(10)
    other.ends_with(0)

    report = machines.is_like(undisturbed)
    assert [(one["cause"], one["lost_steps"]) for one in report["recoveries"]] == [("node lost", 0)]
    assert [one["world_size"] for one in report["generations"]] == [2, 1]
    code, found = machines.inspects("verify", machines.url)
    assert (code, found["damage"]) == (0, []) and STEPS in found["committed"]
    code, status = machines.inspects("status", machines.url)
    assert (status["state"], status["step"]) == ("finished", STEPS)
    assert machines.inspects("diff", machines.url, machines.url)[0] == 0
    again = machines.start()
    again.ends_with(0)
    assert "is finished" in again.output


def test_all_nodes_are_killed_and_another_machine_resumes(machines, undisturbed):
    """SIGKILL to both agents before step 15, with checkpoints of steps 4, 8 and 12. Another
    machine, which never saw the run, resumes from the newest.
    """
    machines.all.shut(5, 9, 13, 15)
    agents = [machines.start(*TWO, "--keep", "9") for _ in range(2)]
    for gate in (5, 9, 13):
        machines.all.stands(gate, ranks=2)
        machines.happens("checkpoint_committed", step=gate - 1)
        machines.all.open(gate)
    machines.all.stands(15, ranks=2)
    for agent in agents:
        agent.signal(signal.SIGKILL)
    for agent in agents:
        agent.wait()
    machines.all.open(15)
    # The newest seconds of events may be lost with the disks, but no checkpoint and no metrics of
    # its steps.
    assert machines.inspects("verify", machines.url) == (0, {"committed": [4, 8, 12], "damage": []})
    assert machines.inspects("status", machines.url)[1]["step"] >= 12
    machines.start().ends_with(0)

    report = machines.is_like(undisturbed)
    assert [one["source"] for one in report["recoveries"]] == ["checkpoint"]
    assert machines.events("restored", source="checkpoint")[0]["step"] == 12
    assert 0 <= report["lost_steps"] <= 2


def test_a_commit_whose_answer_is_lost_is_recognised_as_ours(machines, undisturbed, storage):
    """The store creates each commit record and breaks the connection: for step 4 on every try of
    the library, for the other steps on the first, so that the library then hears that the record
    exists.
    """
    asked = set()

    def is_to_be_lost(method, path):
        if method != "PUT" or not path.endswith("/COMMIT.json"):
            return False
        is_first = path not in asked
        asked.add(path)
        return is_first or f"/{4:012d}/" in path

    lost = storage.fail(Deed.LOSE, is_to_be_lost)
    machines.all.shut(5)
    agent = machines.start("--keep", "9")
    machines.all.stands(5, ranks=1)
    machines.happens("checkpoint_committed", step=4)
    machines.all.open(5)
    agent.ends_with(0)
    assert lost.struck > len(asked)
    machines.is_like(undisturbed)
    # On a slow machine training may be several saves ahead, and then has used a slot again.
    failed = [event["reason"] for event in machines.events("checkpoint_failed")]
    assert all(reason.endswith("was written over before it was saved") for reason in failed)
    steps = [event["step"] for event in machines.events("checkpoint_committed")]
    assert len(steps) == len(set(steps)) and {4, STEPS} <= set(steps)
    assert machines.inspects("verify", machines.url) == (0, {"committed": sorted(steps), "damage": []})


@pytest.mark.parametrize("deeds", [(Deed.ERROR, Deed.SLOW_DOWN), (Deed.HANG,)])
def test_a_store_that_is_away_for_a_while_stops_no_step(machines, undisturbed, storage, deeds):
    """From step 6 to step 14 every request fails, by turns in two ways, or is not answered. The
    steps between are trained all the same.
    """
    machines.all.shut(6, 14)
    agent = machines.start()
    machines.all.stands(6, ranks=1)
    *others, last = deeds
    turns = cycle([True, False])
    faults = [storage.fail(deed, lambda *_: next(turns)) for deed in others]
    faults.append(storage.fail(last, lambda method, path: True))
    machines.all.waits_for(lambda: "the rendezvous did not answer" in agent.output, "the failure being said")
    machines.all.open(6)
    machines.all.stands(14, ranks=1)
    storage.heal()
    assert all(fault.struck for fault in faults)
    machines.all.waits_for(lambda: "answers again" in agent.output, "the store being back")
    machines.all.open(14)
    agent.ends_with(0)
    machines.is_like(undisturbed)


def test_a_store_that_fails_between_listing_and_payload_costs_no_checkpoint(machines, undisturbed, storage):
    """The only checkpoint, of step 4, is listed, and its payload is refused more often than one
    read of it is tried. The machine that wrote it is lost.
    """
    machines.all.shut(5)
    first = machines.start()
    machines.all.stands(5, ranks=1)
    machines.happens("checkpoint_committed", step=4)
    first.signal(signal.SIGKILL)
    first.wait()
    machines.all.open(5)
    refused = storage.fail(
        Deed.SLOW_DOWN, lambda method, path: method == "GET" and path.endswith("/state.safetensors"), times=55
    )
    second = machines.start()
    second.ends_with(0)
    assert refused.struck == refused.times
    machines.is_like(undisturbed)
    assert [event["step"] for event in machines.events("restored")] == [0, 4]
    assert not machines.events("checkpoint_rejected")


def test_old_listings_hide_no_checkpoint_that_the_group_knows(machines, undisturbed, storage):
    """Listings show the store as it was after the checkpoint of step 4. The only machine is lost
    before step 14, with checkpoints of steps 8 and 12. Another asks by name for the newest that the
    group was told of: it is that of step 12, unless the machine died before it told.
    """
    machines.all.shut(5, 9, 13, 14)
    first = machines.start("--keep", "9")
    machines.all.stands(5, ranks=1)
    machines.happens("checkpoint_committed", step=4)
    # What is listed now is what will be shown.
    assert machines.inspects("verify", machines.url)[1]["committed"] == [4]
    stale = storage.fail(Deed.STALE, lambda method, path: "list-type" in path)
    for gate in (5, 9, 13):
        machines.all.stands(gate, ranks=1)
        machines.happens("checkpoint_committed", step=gate - 1)
        machines.all.open(gate)
    machines.all.stands(14, ranks=1)
    first.signal(signal.SIGKILL)
    first.wait()
    machines.all.open(14)
    second = machines.start("--keep", "9")
    assert machines.happens("restored", generation=2)["step"] in (8, 12)
    assert stale.struck
    storage.heal()
    second.ends_with(0)
    machines.is_like(undisturbed)
    # The records of the first machine stay: nothing is committed twice.
    assert machines.inspects("verify", machines.url)[1]["damage"] == []


def test_events_that_do_not_reach_the_store_at_the_end_come_with_the_next_command(
    machines, undisturbed, storage
):
    """From the last step on, no part of an event log or of metrics is taken; saves go on."""
    machines.all.shut(STEPS)
    agent = machines.start()
    machines.all.stands(STEPS, ranks=1)
    storage.fail(
        Deed.HANG, lambda method, path: method == "PUT" and ("/events/" in path or "/metrics/" in path)
    )
    machines.all.open(STEPS)
    agent.ends_with(0)
    assert f"have not reached {machines.url}" in agent.output
    code, report = machines.inspects("report", machines.url)
    assert (code, report["finished"]) == (0, False)
    storage.heal()
    again = machines.again(0)
    again.ends_with(0)
    assert "is finished" in again.output
    machines.is_like(undisturbed)


def test_a_recipe_without_an_agent_writes_its_metrics_to_the_store_too(machines, undisturbed, recipes):
    """Plain python on one machine; elastic-train reads the run from elsewhere, and begins another
    one from it.
    """
    env = {"ELASTIC_RUN_DIR": machines.url}
    machines.all.start_script(recipes / "tiny.py", env=env).ends_with(0)
    code, report = machines.inspects("report", machines.url)
    assert (code, report["finished"], report["steps"]) == (0, True, STEPS)
    assert report["final_digest"] == undisturbed.digest

    second, recipe = f"{machines.url}-second", str(recipes / "tiny.py")
    begins = ["--from", f"{machines.url}@{STEPS}:ema,model", "--run-dir", second]
    machines.all.command([recipe, *begins, "--", "--global-batch", "64"]).ends_with(0)
    (ancestor,) = machines.inspects("report", second)[1]["lineage"]
    assert (ancestor["step"], ancestor["digest"]) == (STEPS, undisturbed.digest)


def test_the_page_of_a_run_in_an_object_store_is_drawn_and_served_from_anywhere(
    machines, undisturbed, recipes, tmp_path
):
    env = {"ELASTIC_RUN_DIR": machines.url}
    machines.all.start_script(recipes / "tiny.py", env=env).ends_with(0)

    assert main(["report", machines.url, "--html", str(tmp_path / "page.html")]) == 0
    assert f"Finished: {STEPS} steps" in (tmp_path / "page.html").read_text()
    with served(machines.url) as server:
        assert f"Finished: {STEPS} steps".encode() in server.ask()[2]


def test_plain_python_on_another_machine_takes_no_record_of_the_first_ones_place(
    machines, recipes, undisturbed
):
    """SIGKILL to the script before step 12, with no checkpoint and some lines uploaded. The next
    machine has the same name, and no files of the run.
    """
    machines.all.shut(12)
    first = machines.start_script(recipes / "tiny.py")
    machines.all.stands(12, ranks=1)
    objects = Objects(machines.url)
    machines.all.waits_for(lambda: objects.listed("metrics"), "lines that are uploaded")
    first.signal(signal.SIGKILL)
    first.wait()
    machines.all.open(12)
    machines.start_script(recipes / "tiny.py").ends_with(0)

    machines.is_like(undisturbed)
    restored = machines.events("restored")
    assert sorted(event["generation"] for event in restored) == [1, 2]
    assert len({event["node"] for event in restored}) == 2
