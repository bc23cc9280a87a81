"""Whether ranks agree when they do a step again tells a machine's fault from a recipe's."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.divergence import Divergence, is_repeated, may_come_as_late, nodes_at_fault

NODES = ("a", "b", "c", "d", "e")
votes = st.lists(st.integers(0, 3), min_size=2, max_size=5).filter(lambda found: len(set(found)) > 1)


def differed(found, nodes=None, **rest):
    fields = {"generation": 1, "step": 9, "agreed": 8, "entry": "m.w", "votes": tuple(found)}
    return Divergence(**(fields | {"nodes": tuple(nodes or NODES[: len(found)])} | rest))


@given(votes, st.data())
def test_nodes_whose_state_is_not_the_redos_were_wrong(found, data):
    """The redo ends in a state that some ranks had before: all others, and only they, are named,
    even if they were more.
    """
    right = data.draw(st.sampled_from(found))
    wrong = nodes_at_fault(differed(found), right)
    assert set(wrong) == {NODES[rank] for rank, vote in enumerate(found) if vote != right}


@given(votes, st.data())
def test_where_the_redo_is_alone_the_majority_decides(found, data):
    """Wrong gradients of one rank reached all states before they were compared, so that none of
    them is right; those that shared them are alike all the same. Without a majority all nodes are
    named, each once.
    """
    ranks = len(found)
    nodes = data.draw(st.lists(st.sampled_from("abc"), min_size=ranks, max_size=ranks))
    for redo in (99, None):
        wrong = nodes_at_fault(differed(found, nodes), redo)
        alike = [vote for vote in set(found) if 2 * found.count(vote) > len(found)]
        expected = (node for node, vote in zip(nodes, found, strict=True) if vote not in alike)
        assert list(wrong) == [*dict.fromkeys(expected)]
        assert wrong  # someone was


@given(st.integers(1, 20))
def test_a_difference_again_as_soon_is_the_recipes(step):
    """A later difference is another event; an audit compares shards, before any state differs: it
    leaves no votes, and is not judged by a redo.
    """
    audited = differed([], at_fault=("b",))
    assert is_repeated(differed([1, 2]), step) == (step <= 9)
    assert not is_repeated(audited, step) and not is_repeated(None, step)
    assert nodes_at_fault(audited, 5) == ("b",)


def test_what_comes_sooner_than_the_first_is_another_event():
    """The first one came after 8 and up to 9 steps; the second generation began with the state of
    step 8. What comes as late again is seen by tests/pure/test_agreement.py.
    """
    assert not may_come_as_late(differed([1, 2]), began=8, agreed=13, step=14)


@given(st.integers(0, 30), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_the_same_delay_is_never_taken_for_a_machine(start, delay, every, first, later):
    """Both times the states differ from the same step after the beginning on, and are compared in
    other steps: the last agreed one lies before it, and the one that found it not.
    """
    one = Divergence(
        generation=1,
        began=start,
        agreed=start + max(delay - later, 0),
        step=start + delay - 1 + every,
        entry="",
    )
    began = one.agreed
    assert may_come_as_late(
        one, began=began, agreed=began + max(delay - 1 - first, 0), step=began + delay + first
    )
