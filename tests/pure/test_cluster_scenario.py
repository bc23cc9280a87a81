"""A scenario is parsed completely, or refused with the number of the wrong line."""

from pathlib import Path

import pytest
from scenario import (
    Action,
    Again,
    End,
    Hold,
    Inject,
    Open,
    Probe,
    Release,
    Shut,
    Stands,
    Start,
    StorageMode,
    Until,
    UntilKnown,
    VolumeFault,
    parse,
    rewritten,
)

SCENARIOS = Path(__file__).parents[1] / "scenarios" / "cluster"

TEXT = """\
# Something happens.
# More about it.
options --max-restarts 0 --faults 'step 3: kill'
within 2.5s
memory 700
volume 16
etcd 3
start 2 --max-nodes 3
shut 6 10 meet-2
stands 6
pause node of rank 0
kill worker of rank 1
cut nodes of ranks 0 1
terminate every node
kill members e1 e2
kill node n1
starve worker of rank -1
fill volume
flip newest checkpoint
until restored generation=2 source=peer
hold 5s
again n1
release
open 6
end 137 0
> generation 1: 2 workers, start
"""


def test_every_command_is_parsed():
    scenario = parse("name", TEXT)

    assert scenario.title == "Something happens."
    assert scenario.options == ("--max-restarts", "0", "--faults", "step 3: kill")
    assert scenario.within_s == 2.5
    assert (scenario.memory_mib, scenario.volume_mib, scenario.members, scenario.nodes) == (700, 16, 3, 2)
    assert scenario.expected == ("generation 1: 2 workers, start",)
    assert scenario.commands == (
        Start(nodes=2, options=("--max-nodes", "3")),
        Shut(gates=("6", "10", "meet-2")),
        Stands(gate="6"),
        Inject(action=Action.PAUSE, ranks=(0,)),
        Inject(action=Action.KILL, ranks=(1,), is_worker=True),
        Inject(action=Action.CUT, ranks=(0, 1)),
        Inject(action=Action.TERMINATE),
        Inject(action=Action.KILL, names=("e1", "e2")),
        Inject(action=Action.KILL, names=("n1",)),
        Inject(action=Action.STARVE, ranks=(-1,), is_worker=True),
        VolumeFault.FILL,
        VolumeFault.FLIP,
        Until(event="restored", fields={"generation": 2, "source": "peer"}),
        Hold(seconds=5.0),
        Again(node="n1"),
        Release(),
        Open(gate="6"),
        End(codes=(0, 137)),
    )


@pytest.mark.parametrize(
    "line",
    [
        "explode",
        "start",
        "start two",
        "stands",
        "kill",
        "kill node",
        "kill node of rank x",
        "pause worker of rank 0",
        "starve node of rank 0",
        "starve every node",
        "kill node n1 x",
        "again",
        "again rank 0",
        "again n1 there",
        "probe",
        "stands 6 10",
        "shut load",
        "fill disk",
        "flip checkpoint",
        "memory much",
        "etcd 1 2",
        "store s3",
        "until",
        "until restored generation",
        "hold 5",
        "release now",
        "within soon",
    ],
)
def test_a_line_that_is_no_command_is_refused_with_its_number(line):
    """Each line is nearly correct; if ignored, the scenario would test less than it says."""
    with pytest.raises(ValueError, match="name, line 3"):
        parse("name", f"# Title.\nstart 1\n{line}\n")


def test_nodes_may_be_pods_that_come_back_elsewhere():
    scenario = parse("name", "# Title.\npods\nstart 1\nprobe n1\nagain n1 elsewhere\n")

    assert scenario.has_pods
    assert scenario.commands[1:] == (Probe(node="n1"), Again(node="n1", is_elsewhere=True))


@pytest.mark.parametrize("line", ["probe n1", "again n1 elsewhere"])
def test_what_only_a_pod_can_do_is_refused_for_other_nodes(line):
    with pytest.raises(ValueError, match="name, line 3"):
        parse("name", f"# Title.\nstart 1\n{line}\n")


def test_faults_of_the_object_store_are_parsed():
    last = ["until the store has restored step=4", "until the group knows 12"]
    lines = ["store", "start 1", *(each.value for each in StorageMode), *last]
    scenario = parse("name", "\n".join(["# Title.", *lines]))

    assert scenario.has_store
    until = Until(event="restored", fields={"step": 4}, is_uploaded=True)
    assert scenario.commands == (Start(nodes=1, options=()), *StorageMode, until, UntilKnown(step=12))


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("", "storage hangs"),
        ("", "until the store has restored"),
        ("", "until the group knows 12"),
        ("store\n", "fill volume"),
        ("store\n", "storage hang"),
        ("store\n", "storage"),
        ("store\n", "until the store has"),
    ],
)
def test_a_fault_of_storage_that_the_scenario_does_not_use_is_refused(before, line):
    """An object store or a shared folder in which the run does not lie: the fault would test
    nothing.
    """
    with pytest.raises(ValueError, match=f"name, line {3 + bool(before)}"):
        parse("name", f"# Title.\n{before}start 1\n{line}\n")


@pytest.mark.parametrize("text", ["start 1\n", "# Title.\nopen 1\n", ""])
def test_a_scenario_without_a_title_or_a_start_is_refused(text):
    with pytest.raises(ValueError, match="expected a comment"):
        parse("name", text)


def test_an_update_replaces_the_expected_history_and_nothing_else():
    written = rewritten(TEXT, ["one", "two"])

    assert written == TEXT.replace("> generation 1: 2 workers, start\n", "> one\n> two\n")
    assert parse("name", written).expected == ("one", "two")


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.txt")), ids=lambda path: path.stem)
def test_every_scenario_of_the_cluster_parses_and_expects_a_history(path):
    scenario = parse(path.stem, path.read_text())

    assert scenario.expected
    assert isinstance(scenario.commands[-1], End)
