"""Every rank learns from the next sum whether all ranks had the same state."""

from dataclasses import replace

import torch
from steps import groups_of

from elastic.divergence import Divergence, vote_of
from elastic.errors import StatesDiffer
from elastic.observe.log import EventLog, read_events
from elastic.proof.agreement import Agreement, Comparison
from elastic.snapshot.copy_to_slot import HostCopy
from elastic.snapshot.image import LiveChecksum
from elastic.snapshot.slots import SnapshotInfo, SnapshotSlots
from elastic.system.control_page import ControlPage, Settled
from elastic.testing.fakes import FakeClock
from elastic.testing.ranks import Member
from elastic.train.state.flat import FlatState
from elastic.train.state.snapshotting import Snapshotting, layout_of

ALONE = Member(rank=0, world_size=1, group=None)


class Node:
    """One worker of a node of its own: its slots, its page, and a state of one tensor."""

    def __init__(self, member, known=None, log=None):
        self.member = member
        self.slots = SnapshotSlots.create(1 << 16, 3)
        self.snapshotting = Snapshotting(lambda _size: self.slots, HostCopy(), FakeClock())
        self.page = ControlPage.create()
        self.value = torch.zeros(4)
        self.agreement = Agreement(
            comparison=Comparison(groups=groups_of(member), node=f"node{member.rank}", generation=2, log=log),
            page=self.page,
            snapshotting=self.snapshotting,
            flatten=self.flatten,
            step=0,
            known=known,
        )

    def flatten(self):
        return FlatState(tensors={"m.w": self.value}, document={"m": {}})

    def trains(self, step, value, *, is_kept=True):
        """Ends the step with this state, of which a snapshot is taken where there is room."""
        self.value.fill_(value)
        info = SnapshotInfo(step=step, epoch=0, generation=2, world_size=2, torch="2")
        if is_kept:
            checksum = self.snapshotting.take(self.flatten(), info).snapshot.info.checksum
        else:
            checksum = LiveChecksum(layout_of(self.flatten(), info))
        self.agreement.add(step, checksum)

    def sums(self, undo=lambda: None):
        """The end-of-step all-reduce of the next step."""
        total = torch.tensor(self.agreement.numbers(), dtype=torch.float64)
        torch.distributed.all_reduce(total, group=self.member.group)
        self.agreement.read(total.tolist(), undo)

    def agreed_snapshots(self):
        return [each.info.step for each in self.slots.whole() if each.is_agreed]


def test_a_lone_rank_on_a_gpu_agrees_by_the_next_sum():
    """Its checksum is ready only then, and with it the copy of that step counts."""
    node = Node(ALONE)
    groups = replace(node.agreement.comparison.groups, device=torch.device("cuda"))
    node.agreement.comparison = replace(node.agreement.comparison, groups=groups)
    node.trains(1, 1.0, is_kept=False)
    assert node.agreement.step == 0
    assert node.agreement.numbers() == []
    assert node.agreement.step == 1


def steps_until_a_difference(member, different_rank, explicit):
    """Steps 1 to 3 in all ranks; after step 3 one rank has another state."""
    node = Node(member)
    seen = []
    for step in (1, 2):
        node.trains(step, float(step))
        seen.append(node.agreed_snapshots())
        node.sums()
    seen.append(node.agreed_snapshots())
    node.trains(3, 3.0 if member.rank != different_rank else 3.5)
    undone = []
    try:
        node.agreement.compare() if explicit else node.sums(lambda: undone.append(3))
    except StatesDiffer as error:
        known = error.divergence
        return [
            seen,
            known.step,
            known.agreed,
            known.entry,
            list(known.nodes),
            undone,
            len(node.slots.whole()),
        ]
    return [seen, node.agreed_snapshots()]


def test_a_snapshot_counts_only_once_the_next_sum_has_shown_that_all_ranks_had_it(ranks):
    """Snapshots 1 and 2 are marked one step later. That of step 3 differs on rank 2 alone: every
    rank says so, takes back what the step has changed so far, and voids its own snapshot.
    """
    for seen, step, agreed, entry, nodes, undone, num_whole in ranks.run(
        3, steps_until_a_difference, 2, False
    ):
        assert seen == [[], [1], [2, 1]]
        assert (step, agreed, entry, nodes) == (3, 2, "m.w", ["node0", "node1", "node2"])
        assert (undone, num_whole) == ([3], 2)


def test_where_no_step_follows_ranks_compare_at_once(ranks):
    """At the last step and at drains."""
    for seen, step, agreed, *_ in ranks.run(2, steps_until_a_difference, 1, True):
        assert (seen, step, agreed) == ([[], [1], [2, 1]], 3, 2)
    for _, agreed in ranks.run(2, steps_until_a_difference, None, True):
        assert agreed == [3, 2, 1]


def shared_steps(member, slots, without):
    """What each rank's page says after sums for steps 1 and 2, and after an exchange for step 3.

    slots: of the last rank. without: steps after which that rank has no room for its snapshot.
    """
    node = Node(member)
    is_last_rank, seen = member.rank == member.world_size - 1, []
    if is_last_rank:
        node.slots = SnapshotSlots.create(1 << 16, slots)
    for step in (1, 2, 3):
        node.trains(step, float(step), is_kept=not is_last_rank or step not in without)
        node.agreement.compare(is_last=True) if step == 3 else node.sums()
        seen.append(node.page.shared_step)
    return seen


def test_a_step_is_shared_where_every_node_keeps_a_copy_of_it(ranks):
    """In memory for one copy it stays only where no step follows, whose copy would replace it."""
    for slots, without, expected in (
        (3, [], [1, 2, 3]),
        (3, [2], [1, 1, 3]),
        (3, [3], [1, 2, 2]),
        (1, [], [0, 0, 3]),
        (1, [1, 2, 3], [0, 0, 0]),
    ):
        assert ranks.run(2, shared_steps, slots, without) == [expected] * 2


def test_a_single_rank_agrees_with_itself_at_once():
    """No step follows the last one of a world of one, and none is needed."""
    node = Node(ALONE)
    node.trains(1, 1.0)
    assert node.agreed_snapshots() == [1]
    assert node.agreement.numbers() == []


def test_votes_are_on_the_control_page_before_the_sum():
    """The agent judges by them if the workers die in the step between. The newest two are there."""
    node = Node(Member(rank=0, world_size=2, group=None))
    for step in (1, 2, 3):
        node.trains(step, float(step))
    votes = node.page.votes(0)
    assert sorted(votes) == [2, 3]
    assert votes[3] == vote_of(node.slots.newest().info.checksum)
    assert node.agreed_snapshots() == []


def judged(member, votes, redo_step):
    """What the page of each node says once step 2 was done again; rank 0 was right in it."""
    known = Divergence(
        generation=1, step=2, agreed=1, entry="m.w", votes=tuple(votes), nodes=("node0", "node1")
    )
    node = Node(member, known)
    wanted = [node.agreement.is_wanted(step) for step in (1, 2, 3)]
    if redo_step:
        node.trains(redo_step, 2.0)
        node.sums()
    else:
        node.agreement.step = 2
        node.agreement.begin()
    right = vote_of(node.slots.newest().info.checksum) if redo_step else 0
    return [wanted, node.page.settled, right]


def test_the_redo_shows_which_node_was_wrong(ranks):
    """Steps up to that of the difference are compared for certain, and then the node learns of it
    whose vote was another one than that of the redo.
    """
    (_, _, right), _ = ranks.run(2, judged, [1, 2], 2)
    for votes, expected in (
        ([right, 5], [Settled.ELSEWHERE, Settled.HERE]),
        ([5, right], [Settled.HERE, Settled.ELSEWHERE]),
        ([5, 6], [Settled.HERE, Settled.HERE]),  # one of them, and no one can say which
    ):
        answers = ranks.run(2, judged, votes, 2)
        assert [wanted for wanted, *_ in answers] == [[True, True, False]] * 2
        assert [settled for _, settled, _ in answers] == expected


def test_the_line_blames_a_machine_or_what_the_recipe_read_of_the_world(tmp_path, capsys):
    """The two cannot be told apart the first time, and only the recipe's author knows."""
    log = EventLog(tmp_path / "u.jsonl", node="node0", clock=FakeClock())
    known = Divergence(
        generation=1, step=2, agreed=1, entry="m.w", votes=(1, 5, 1), nodes=("node0", "node1", "node2")
    )
    node = Node(ALONE, known, log)
    node.agreement.step = 2
    node.agreement.begin()
    said = capsys.readouterr().out
    assert "a machine computed something else (node1), or the recipe read what" in said
    (event,) = read_events(tmp_path)
    assert (event.event.nodes, event.event.verdict) == (["node1"], "machine")


def test_a_difference_is_not_settled_before_its_step_was_done_again(ranks):
    assert [settled for _, settled, _ in ranks.run(2, judged, [1, 2], 1)] == [Settled.NOT] * 2


def test_a_run_that_resumes_behind_the_difference_settles_it_by_the_votes(ranks):
    """The workers died after they agreed on the step and before they could say so."""
    assert [settled for _, settled, _ in ranks.run(2, judged, [1, 2], 0)] == [Settled.HERE] * 2
