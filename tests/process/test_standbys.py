"""A standby has run the script when a fault comes, and the run is the same with it as without."""

import os
import signal
from pathlib import Path

import pytest

ONE = ("--snapshot-every", "1", "--standby", "on")
TWO = (*ONE, "--nproc-per-node", "2")

# A recipe that tells what it finds at its beginning, and in its steps.
RECIPE = """
import os
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import elastic
beside = Path(__file__).parent
print("bare", os.environ.get("LOCAL_RANK"))
run = elastic.start(seed=0, global_batch=8, shards=2)
run.print("kept")
{at_start}
print("drawn", torch.rand(1).item())
model = torch.nn.Linear(4, 1)
data = run.data(TensorDataset(torch.randn(64, 4)), steps=20)
for step in run.steps(data, elastic.State(model=model)):
    print("rank", os.environ["RANK"], run.rank, run.world_size)
    while step.number == 4 and not (beside / "go").exists():
        pass
    step.mean_loss(lambda batch: model(batch.data[0]).square().mean())
    with torch.no_grad():
        model.weight.sub_(0.1 * model.weight.grad)
"""


@pytest.fixture
def starts(drill):
    """Starts the recipe with these lines at its beginning, on a node of its own."""
    recipe = drill.folder / "recipe.py"

    def start(at_start="", options=ONE):
        recipe.write_text(RECIPE.format(at_start=at_start))
        return drill.start(*options, recipe=recipe)

    return start


def are_ready(drill, number):
    """Wait for so many standbys; returns their pids."""
    drill.waits_for(lambda: len(drill.events("standby_waits")) >= number, f"{number} standbys")
    return [event["pid"] for event in drill.events("standby_waits")][-number:]


def killed(drill, agent):
    """Its worker of rank 0, before step 4; then the run comes to its end."""
    drill.kill_worker(0, generation=1)
    (drill.folder / "go").touch()
    agent.ends_with(0)


def printed(drill):
    """By rank 0 in both generations."""
    return [(drill.run.logs / f"00000{n}" / "rank0.log").read_text().splitlines() for n in (1, 2)]


def ranking(pid):
    """How early the kernel kills a process for want of memory, and how little it runs."""
    score = int(Path(f"/proc/{pid}/oom_score_adj").read_text())
    return score, os.getpriority(os.PRIO_PROCESS, pid)


def test_standbys_take_over_and_the_weights_are_the_same(drill, undisturbed):
    """Twice, so that the second fault finds those that were started after the first."""
    drill.shut(5, 9)
    agent, pids = drill.start(*TWO), []
    for generation, step in ((1, 5), (2, 9)):
        drill.stands(step, ranks=2)
        pids += are_ready(drill, 2 * generation)[-2:]
        assert ranking(pids[-1]) > ranking(agent.pid)
        drill.kill_worker(1, generation=generation)
        drill.happens("worker_started", generation=generation + 1, rank=1)
        assert ranking(pids[-1]) == ranking(pids[-2]) == ranking(agent.pid)
        drill.open(step)
    drill.ends_like(undisturbed, agent)
    started = drill.events("worker_started")
    assert [each["standby"] for each in started] == [False, False, True, True, True, True]
    assert {each["pid"] for each in started[2:]} == {*pids}
    report = drill.inspects("report", drill.run.url)[1]
    assert [each["standby"] for each in report["recoveries"]] == [True, True]
    assert agent.output.count(" with standby workers: rank 1 was killed by SIGKILL, 0 steps lost") == 2
    logs = [path.name for path in drill.run.logs.glob("*/*")]
    assert sorted(logs) == sorted(3 * ["rank0.log", "rank1.log"])


def test_what_a_standby_prints_comes_once_it_takes_over(drill, starts):
    """Its log is that of its worker, and run.print of rank 0 alone is in it. The numbers that it
    draws are those of any worker, although the groups were opened in the middle.
    """
    agent = starts(options=TWO)
    are_ready(drill, 2)
    assert agent.output.count("bare") == 2
    killed(drill, agent)
    first, second = printed(drill)
    assert first[:3] == ["bare 0", "kept", second[1]]
    assert second[:4] == ["bare 0", first[2], "kept", "rank 0 0 2"]
    assert agent.output.count("bare") == 4 and agent.output.count("kept") == 2


@pytest.mark.parametrize(
    "asks",
    [
        "run.rank",
        "os.environ.copy()",
        "os.fork() or os._exit(0)",
    ],
)
def test_a_standby_waits_where_the_script_asks_for_its_rank(drill, starts, asks):
    """Or would do what another process may notice. It goes on from there, with the same random
    numbers, although it opens the groups there.
    """
    agent = starts(f"torch.rand(3); print('asked', {asks}, flush=True)")
    (pid,) = are_ready(drill, 1)
    (log,) = drill.run.logs.glob("*/standby-*")
    assert "asked" not in log.read_text()
    killed(drill, agent)
    assert drill.pid_of_rank(0, 2) == pid
    first, second = printed(drill)
    drawn = [line for line in (*first, *second) if line.startswith("drawn")]
    assert len(drawn) == 2 and len({*drawn}) == 1


def test_a_standby_that_ends_is_no_failure(drill, starts):
    """Its script runs once at a time. The run goes on, and a fault finds no standby."""
    agent = starts("(beside / 'taken').mkdir()")
    ended = drill.happens("standby_ended")
    drill.waits_for(lambda: f"the standby worker of {ended['reason']}" in agent.output, "its line")
    (drill.folder / "taken").rmdir()
    killed(drill, agent)
    assert drill.values("worker_started", "standby") == [(False,), (False,)]


def test_a_standby_of_an_older_text_is_not_used(drill, starts):
    """The recipe is edited after it has begun."""
    agent = starts()
    are_ready(drill, 1)
    recipe = drill.folder / "recipe.py"
    recipe.write_text(recipe.read_text() + "\n# edited\n")
    killed(drill, agent)
    assert drill.values("worker_started", "standby") == [(False,), (False,)]
    assert drill.values("recipe_edited", "step") == [(3,)]


def test_a_spare_node_starts_with_its_standby(drill, undisturbed):
    """The group is full. Its node is killed, and the spare one has run the script."""
    first = drill.start_before(6, *ONE, "--max-nodes", "1")
    spare = drill.start(*ONE, "--max-nodes", "1")
    are_ready(drill, 2)
    drill.happens("checkpoint_committed", step=4)
    first.signal(signal.SIGKILL)
    drill.happens("generation_started", generation=2)
    drill.open(6)
    drill.ends_like(undisturbed, spare)
    assert [each["standby"] for each in drill.events("worker_started")] == [False, True]


def test_a_rehearsal_is_done_by_standbys(drill, undisturbed):
    """And finds the same bits. It is no recovery, and no generation that a user is told of."""
    agent = drill.start_before(7, *TWO, "--rehearse", "8steps", ranks=2)
    are_ready(drill, 2)
    drill.open(7)
    drill.ends_like(undisturbed, agent)
    assert drill.values("rehearsed", "step", "verdict")[0] == (8, "alike")
    report = drill.inspects("report", drill.run.url)[1]
    assert not report["recoveries"] and "same bits" in agent.output and "\ngeneration 2" not in agent.output
    by_generation = drill.values("worker_started", "generation", "standby")
    assert [standby for generation, standby in by_generation if generation == 2] == [True, True]
