"""A sharded run has the bits of the replicated one, at every world size and whatever dies."""

import sys

import pytest

RECIPE = "sharded.py"
EVERY_STEP = "--snapshot-every", "1"
NODE_0 = "--faults", "step 12 node 0: kill"


@pytest.fixture
def replicated(reference, recipes):
    """The run of the same recipe without run.fully_shard, with one worker."""

    def run(*arguments):
        name = "-".join(("replicated", *(each.strip("-") for each in arguments)))
        return reference(name, recipe=recipes / RECIPE, arguments=("--replicated", *arguments))

    return run


@pytest.fixture
def starts(drill, recipes):
    def start(*options, arguments=()):
        return drill.start(*options, recipe=recipes / RECIPE, arguments=arguments)

    return start


def is_like(drill, agent, expected):
    """All but the recipe's arguments, which are no part of the trajectory."""
    agent.ends_with(0)
    assert drill.values("run_finished", "digest") == [(expected.digest,)], drill.output


@pytest.mark.parametrize("workers", ["1", "2", "3", "4"])
@pytest.mark.parametrize("arguments", [(), ("--sums",)], ids=["mean", "sums"])
def test_it_has_the_digest_of_the_replicated_run(drill, starts, replicated, workers, arguments):
    """Three workers have two shards at most, and one of them fills a round. Each audits."""
    agent = starts("--nproc-per-node", workers, "--audit", "3steps", arguments=arguments)
    is_like(drill, agent, replicated(*arguments))
    _, report = drill.inspects("report", drill.run.url)
    assert (report["audits"]["done"], report["audits"]["failed"]) == (6, 0)


def test_a_killed_worker_costs_no_step(drill, starts, replicated):
    drill.shut(7)
    agent = starts("--nproc-per-node", "3", *EVERY_STEP)
    drill.stands(7, ranks=3)
    drill.kill_worker(1, generation=1)
    drill.open(7)
    is_like(drill, agent, replicated())
    assert drill.values("restored", "lost_steps") == [(0,), (0,)]


def test_a_node_joins_and_another_leaves(drill, starts, replicated):
    """The step before each change is done again by the new group, and compared."""
    drill.shut(5, 12)
    options = ("--max-nodes", "2", "--rehearse", "1000", *EVERY_STEP)
    first = starts(*options)
    drill.stands(5, ranks=1)
    second = starts(*options)
    drill.happens("drain_requested")
    drill.open(5)
    drill.stands(12, ranks=2)
    first.signal(15)
    drill.waits_for(lambda: len(drill.events("drain_requested")) > 1, "the drain")
    drill.open(12)
    first.ends_with(75)
    is_like(drill, second, replicated())
    assert drill.values("overlapped", "verdict") == [("alike",), ("alike",)]


def test_another_number_of_workers_resumes_a_checkpoint(drill, starts, replicated):
    """And shards other modules."""
    drill.shut(9)
    agent = starts("--nproc-per-node", "2")
    drill.drains(agent, 9, ranks=2)
    is_like(drill, starts("--nproc-per-node", "3"), replicated())
    assert drill.values("restored", "step", "source")[-1] == (9, "checkpoint")


@pytest.mark.parametrize(("copies", "restored"), [("2", (12, "snapshot")), ("1", (10, "checkpoint"))])
def test_a_node_dies_with_the_parts_of_its_ranks(drill, starts, replicated, copies, restored):
    """That of rank 0. The other one has copies, or not."""
    group = "--nproc-per-node 2 --max-nodes 2 --save-every 5steps --last-call 5s --snapshot-copies"
    faults = "--faults", "step 12 node 0: kill"
    drill.shut(11, 13)
    first, second = (starts(*group.split(), copies, *EVERY_STEP, *faults) for _ in range(2))
    drill.stands(11, ranks=4)
    drill.waits_for(lambda: drill.is_committed(10), "a checkpoint")
    drill.open(11)
    drill.happens("generation_started", cause="node lost")
    drill.open(13)
    left = next(agent for agent in (first, second) if agent.wait() != -9)
    is_like(drill, left, replicated())
    assert drill.values("restored", "step", "source")[-1] == restored
    rejected = "some of its parts were in the memory of nodes that are gone"
    assert (rejected in left.output) == (copies == "1")


def test_a_node_leaves_as_another_dies(drill, starts, replicated):
    """The third one lacks what both have: the drain of the next generation saves it."""
    drill.shut(11, 13)
    nodes = [starts("--max-nodes", "3", *EVERY_STEP, *NODE_0) for _ in range(3)]
    drill.stands(11, ranks=3)
    drill.open(11)
    drill.happens("generation_started", cause="node lost")
    leaver, other = (each for each in nodes if each.process.poll() is None)
    leaver.signal(15)
    drill.open(13)
    leaver.ends_with(75)
    is_like(drill, other, replicated())
    assert {lost for (lost,) in drill.values("restored", "lost_steps")} == {0}


DAMAGES = {
    "torn": lambda part: part.write_bytes(part.read_bytes()[:-1]),
    "missing": lambda part: part.unlink(),
    "flipped": lambda part: part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_never_loaded(drill, starts, replicated, damage):
    drill.shut(9)
    agent = starts("--nproc-per-node", "3", "--save-every", "8steps")
    drill.waits_for(lambda: drill.is_committed(8), "a checkpoint")
    drill.drains(agent, 9, ranks=3)
    (part,) = drill.run.local.glob(f"checkpoints/{9:012d}/*/part-00002-*.safetensors")
    DAMAGES[damage](part)
    code, found = drill.inspects("verify", drill.run.url)
    assert code and [each["step"] for each in found["damage"]] == [9], found
    is_like(drill, starts("--nproc-per-node", "2"), replicated())
    assert drill.values("restored", "step", "source")[-1] == (8, "checkpoint")


BOTH = "step 9 mid-sum: flip; step 9 rank 1 mid-sum: flip"
RESTARTED = "step 9 rank 1: kill; step 9 mid-sum: flip optimizer"


@pytest.mark.parametrize(("faults", "flipped"), [(BOTH, "model"), (RESTARTED, "kept")])
def test_a_flipped_bit_of_rows_changes_nothing(drill, starts, replicated, faults, flipped):
    """No other rank has them. On both ranks, or in a generation's first step."""
    is_like(drill, starts("--nproc-per-node", "2", *EVERY_STEP, "--faults", faults), replicated())
    ((entry, alike),) = drill.values("divergence_detected", "entry", "ranks")
    assert (entry.split(".")[0], alike) == (flipped, [[0], [1]])
    assert drill.values("divergence_judged", "step", "verdict") == [(8, "machine")]


def test_a_wrong_gradient_is_computed_again(drill, starts, replicated):
    """Each worker has one shard."""
    agent = starts("--nproc-per-node", "4", "--audit", "1steps", "--faults", "step 6: flip gradient")
    is_like(drill, agent, replicated())
    assert drill.values("audit_failed", "step", "verdict") == [(6, "machine")]


def test_a_rehearsal_deals_shards_anew(drill, starts, replicated):
    is_like(drill, starts("--nproc-per-node", "3", "--rehearse", "5", *EVERY_STEP), replicated())
    assert {verdict for (verdict,) in drill.values("rehearsed", "verdict")} == {"alike"}


@pytest.mark.parametrize("step", ["6", "-7"], ids=["after", "before"])
def test_the_recipe_leaves_its_loop_early(drill, starts, replicated, step):
    """After an update, or before the gradients of the step after it."""
    agent = starts("--nproc-per-node", "2", *EVERY_STEP, arguments=("--leave", step))
    is_like(drill, agent, replicated("--leave", "6"))


REFUSED = {
    "memory": "the gradient of sharded module",  # of a backward, which an audit finds
    "clip": "elastic.clip_grad_norm_ for torch.nn.utils.clip_grad_norm_",
    **dict.fromkeys(["sum", "row"], "expected operations row by row on a sharded tensor"),
    "data": "found p.data = x, which torch takes and forgets",
    "hook": "found a hook of model.0.weight",
    "settings": "expected a sharded module whose sums are the run's",
    "optimizer": "expected an optimizer that updates each number by itself",
    "penalty": "found a term of the loss that uses them by itself",
    "unused": "expected a gradient of each of its",
    **dict.fromkeys(["some first", "some last"], "expected gradients in every shard or in none"),
    "order": "expected every worker to use the sharded modules in one order",
    "torch": "shard its module by run.fully_shard",
    **dict.fromkeys(["alone first", "alone in it", "alone last"], "make each such call on all of them"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_would_depend_on_the_world_size_is_refused(drill, starts, fault):
    agent = starts("--nproc-per-node", "2", "--audit", "2steps", arguments=("--fault", fault))
    agent.ends_with(1 if fault == "memory" else 2)
    assert REFUSED[fault] in agent.output


def test_under_torchrun_the_script_ends_well(drill, recipes):
    command = "-m torch.distributed.run --nproc-per-node 2 --standalone"
    words = [sys.executable, *command.split(), str(recipes / RECIPE)]
    drill.execute(words, {"ELASTIC_RUN_DIR": drill.run.url}).ends_with(0)
