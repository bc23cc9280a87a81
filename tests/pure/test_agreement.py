"""Every rank learns from the next sum whether all ranks had the same state; ranks that differ are
stopped, all of them, with the name of what differs.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from steps import ALONE, groups_of

from elastic.divergence import Divergence, vote_of
from elastic.errors import RecipeNotExact, StatesDiffer
from elastic.proof.agreement import Agreement, Comparison
from elastic.reduce.exchange import decode, encode
from elastic.snapshot.copy_to_slot import HostCopy
from elastic.snapshot.image import LiveChecksum
from elastic.snapshot.slots import SnapshotInfo, SnapshotSlots
from elastic.system.control_page import ControlPage
from elastic.testing.fakes import FakeClock
from elastic.train.state.flat import FlatState, checksum_of, state_evidence
from elastic.train.state.snapshotting import Snapshotting, layout_of


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
            evidence=lambda: state_evidence(self.flatten()),
            step=0,
            known=known,
        )

    def flatten(self):
        return FlatState(tensors={"m.w": self.value}, document={"m": {}})

    def trains(self, step, value, *, is_kept=True):
        """Ends the step with this state, of which a snapshot is taken where there is room."""
        self.value.fill_(value)
        info = SnapshotInfo(step=step, generation=2)
        if is_kept:
            checksum = self.snapshotting.take(self.flatten(), info).snapshot.info.checksum
        else:
            checksum = LiveChecksum(layout_of(self.flatten(), info))
        self.agreement.add(step, checksum)

    def sums(self, undo=lambda: None):
        """The end-of-step all-reduce of the next step."""
        ballots = [each - (each >> 63 << 64) for each in self.agreement.ballots()]
        total = encode(torch.tensor(ballots), [])
        torch.distributed.all_reduce(total, group=self.member.group)
        self.agreement.read(decode(total.tolist(), len(ballots))[0], undo)

    def agreed_snapshots(self):
        return [each.info.step for each in self.slots.whole() if each.is_agreed]


def test_a_single_rank_agrees_with_itself_at_once():
    """No step follows the last one of a world of one, and none is needed. On a GPU its checksum is
    ready only with the next sum, and with it the copy of that step counts.
    """
    node = Node(ALONE)
    node.trains(1, 1.0)
    assert node.agreed_snapshots() == [1]
    groups = replace(node.agreement.comparison.groups, device=torch.device("cuda"))
    node.agreement.comparison = replace(node.agreement.comparison, groups=groups)
    node.trains(2, 1.0, is_kept=False)
    assert node.agreement.step == 1
    assert node.agreement.ballots() == []
    assert node.agreement.step == 2


def steps_until_a_difference(member, different_rank, explicit):
    """Steps 1 to 3 in all ranks; after step 3 one rank has another state."""
    node, seen, undone = Node(member), [], []
    for step in (1, 2):
        node.trains(step, float(step))
        seen.append(node.agreed_snapshots())
        node.sums()
    seen.append(node.agreed_snapshots())
    node.trains(3, 3.0 if member.rank != different_rank else 3.5)
    try:
        node.agreement.compare() if explicit else node.sums(lambda: undone.append(3))
    except StatesDiffer as error:
        known = error.divergence
        found = [known.step, known.agreed, known.entry, list(known.nodes), len(set(known.votes))]
        return [seen, found, undone, len(node.slots.whole())]
    return [seen, node.agreed_snapshots()]


@pytest.mark.parametrize(("world_size", "explicit"), [(3, False), (2, True)])
def test_a_snapshot_counts_once_all_ranks_had_it(ranks, world_size, explicit):
    """Snapshots 1 and 2 are marked one step later, by the next sum. That of step 3 differs on the
    last rank alone: every rank says so, takes back what the step has changed so far, and voids its
    own snapshot. At the last step and at drains, where no step follows, ranks compare at once.
    """
    nodes = [f"node{rank}" for rank in range(world_size)]
    expected = [[[], [1], [2, 1]], [3, 2, "m.w", nodes, 2], [] if explicit else [3], 2]
    found = ranks.run(world_size, steps_until_a_difference, world_size - 1, explicit)
    assert found == [expected] * world_size
    if explicit:
        assert [agreed for _, agreed in ranks.run(2, steps_until_a_difference, None, True)] == [[3, 2, 1]] * 2


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


@pytest.mark.parametrize(
    ("slots", "without", "expected"),
    [
        (3, [], [1, 2, 3]),
        (3, [2], [1, 1, 3]),
        (3, [3], [1, 2, 2]),
        (1, [], [0, 0, 3]),
        (1, [1, 2, 3], [0, 0, 0]),
    ],
)
def test_a_step_is_shared_where_every_node_keeps_a_copy_of_it(ranks, slots, without, expected):
    """In memory for one copy it stays only where no step follows, whose copy would replace it."""
    assert ranks.run(2, shared_steps, slots, without) == [expected] * 2


def changed_after_its_vote(member):
    node = Node(member)
    node.trains(1, 1.0)
    node.value.fill_(member.rank)
    with pytest.raises(StatesDiffer) as raised:
        node.agreement.compare_anew(1)
    return [node.agreement.step, raised.value.divergence.entry]


def test_states_that_changed_after_their_votes_differ(ranks):
    """The votes agree, and count; a bit has flipped since."""
    assert ranks.run(2, changed_after_its_vote) == [[1, "m.w"]] * 2


def difference(votes, *, step=2, agreed=1):
    nodes = tuple(f"node{rank}" for rank in range(len(votes)))
    return Divergence(generation=1, step=step, agreed=agreed, entry="m.w", votes=tuple(votes), nodes=nodes)


def judged(member, votes, redo_step):
    """Which nodes are judged once step 2 was done again; rank 0 was right in it."""
    events = []
    node = Node(member, difference(votes), SimpleNamespace(record=events.append))
    wanted = [node.agreement.is_wanted(step) for step in (1, 2, 3)]
    if redo_step:
        node.trains(redo_step, 2.0)
        node.sums()
    else:
        node.agreement.step = 2
        node.agreement.begin()
    right = vote_of(node.slots.whole()[0].info.checksum) if redo_step else 0
    return [wanted, [each.nodes for each in events], node.page.is_settled, right]


def test_the_redo_shows_which_node_was_wrong(ranks):
    """Steps up to that of the difference are compared for certain, and then the node learns of it
    whose vote was another one than that of the redo. Before, a difference is not settled; a run
    that resumes behind it, since the workers died before they could say so, settles it by the
    votes.
    """
    (*_, right), _ = ranks.run(2, judged, [1, 2], 2)
    for votes, redo_step, expected in (
        ([right, 5], 2, [["node1"]]),
        ([5, right], 2, [["node0"]]),
        ([5, 6], 2, [["node0", "node1"]]),  # one of them, and no one can say which
        ([1, 2], 1, []),
        ([1, 2], 0, [["node0", "node1"]]),
    ):
        answers = ranks.run(2, judged, votes, redo_step)
        assert [wanted for wanted, *_ in answers] == [[True, True, False]] * 2
        assert [nodes for _, nodes, *_ in answers] == [expected] * 2
        assert [settled for *_, settled, _ in answers] == [bool(expected)] * 2


def told(member, values, step, known_step=None, redo=False, agreed=None):
    """What a rank is told that holds its own value of an entry.

    The state is that of `step`, with which the generation begins; with `agreed`, that of a step of
    a generation that began at step 8. known_step: of the difference because of which it is begun
    with again. redo: the generation before ended by a difference; only one node knows of it.
    """
    tensors = {"model.a": torch.zeros(2), "model.b": torch.tensor([values[member.rank]])}
    found = checksum_of(FlatState(tensors=tensors, document={"model": {}}))
    known = None if known_step is None else difference([1, 2], step=known_step, agreed=0)
    comparison = Comparison(
        groups=groups_of(member),
        node=f"node{member.rank}",
        generation=4,
        log=None,
        ended_by=difference([1, 2], step=9, agreed=8) if redo and member.rank else None,
    )
    try:
        if agreed is None:
            comparison.check_same_state(found, step=step, known=known)
        else:
            comparison.raise_difference(found, [1, 2], step=step, agreed=agreed, began=8, known=known)
    except StatesDiffer as error:
        return ["machine?", str(error)]
    except RecipeNotExact as error:
        return ["recipe", str(error)]
    return ["alike", ""]


AGAIN = "They differed about 9 steps after the last beginning too"
BUILT = "Every rank must build the same objects: from the run's seed after elastic.start, without a rank"


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (([1.0, 1.0], 7, 7), "alike", ""),
        (([1.0, 2.0], 6, 7), "recipe", "model.b differs between ranks [0] | [1] after step 6. So it did"),
        (([1.0, 2.0], 7, 7), "recipe", "draws from a generator of its own"),
        (
            ([1.0, 1.0000001, 1.0], 8, 7),
            "machine?",
            "model.b differs between ranks [0, 2] | [1] after step 8",
        ),
        (([1.0, 2.0], 0, None), "recipe", BUILT),
        (([1.0, 2.0], 0, 0), "recipe", BUILT),
        (([1.0, 2.0], 17, None, True, 16), "recipe", AGAIN),
        (([1.0, 2.0], 17, None, False, 16), "machine?", "all agreed up to step 16"),
    ],
)
def test_what_comes_again_condemns_no_machine(ranks, arguments, kind, words):
    """The step before that of a difference, or the same: from one state, twice, the ranks came to
    different ones. A difference in a step that was not reached before is another event; but one
    that comes as many steps after a beginning is that of a function with a memory, which agrees in
    each redo. Of objects that ranks build differently a redo may agree, because a file is there by
    then that one rank had read half written.
    """
    for found, message in ranks.run(len(arguments[0]), told, *arguments):
        assert found == kind and words in message


def test_the_difference_is_recorded_before_any_rank_may_end():
    """The agent kills its other workers as soon as one ended: the last message between the ranks
    comes after the record.
    """
    order = []

    groups = SimpleNamespace(all_gather=lambda value: order.append("message") or [value, value])
    log = SimpleNamespace(record=lambda _event: order.append("record"))
    found = checksum_of(FlatState(tensors={"model.a": torch.zeros(2)}, document={"model": {}}))
    comparison = Comparison(groups=groups, node="n", generation=4, log=log)
    with pytest.raises(StatesDiffer):
        comparison.raise_difference(found, [1, 2], step=7, agreed=6, began=0, known=None)
    assert order.index("record") < len(order) - 1 and order[-1] == "message"
