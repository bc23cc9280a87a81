"""Four computations of one shard tell a machine that erred once from a recipe that is not exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proof.audit_verdict import (
    DATA,
    Audited,
    Culprit,
    audited_by,
    audited_shard,
    auditor_of,
    judge,
    sentence,
)
from elastic.proof.evidence import Evidence
from elastic.reduce.tree import span

NAMES = [DATA, "what call 1 of the step returned", "the buffer m.mean", "the gradient of m.weight"]
evidence = st.tuples(*[st.sampled_from(["a", "b"])] * len(NAMES)).map(
    lambda found: Evidence(dict(zip(NAMES, found, strict=True)))
)
four = st.tuples(evidence, evidence, evidence, evidence).filter(lambda found: found[0] != found[1])


def of_one(name, values):
    """Four computations that give these values of one entry."""
    return tuple(Evidence({name: each}) for each in values)


def verdict_of(found: tuple[Evidence, ...], *, is_redo: bool = False, has_copies: bool = False):
    first, again, owners_second, auditors_second = found
    return judge(
        first=first,
        again=again,
        owners_second=owners_second,
        auditors_second=auditors_second,
        is_redo=is_redo,
        has_copies=has_copies,
    )


@given(four)
def test_a_machine_is_blamed_only_where_three_of_four_computations_agree(found):
    """Beside a dumb twin: sort the four by what they found, and look for one against three."""
    alone = [i for i in range(4) if [other == found[i] for other in found].count(True) == 1]
    agree = len({repr(each) for each in found}) == 2 and len(alone) == 1
    expected = {0: Culprit.OWNER, 1: Culprit.AUDITOR}.get(alone[0]) if agree else None
    assert verdict_of(found).culprit is (expected or Culprit.RECIPE)


@given(four)
def test_what_fails_again_at_the_redo_of_its_step_is_the_recipe(found):
    """A recipe that does something at its very first call alone looks like a machine's error; after
    the step was done again it is at its first call again.
    """
    assert verdict_of(found, is_redo=True).culprit is Culprit.RECIPE


@given(four)
def test_no_machine_is_blamed_for_data_of_which_processes_have_copies(found):
    """The owner's samples came from such a process, and the three others from a dataset that the
    loop has changed since: three of four agree.
    """
    verdict = verdict_of(found, has_copies=True)
    same_data = found[0].entries[DATA] == found[1].entries[DATA]
    assert verdict.culprit is (verdict_of(found).culprit if same_data else Culprit.RECIPE)


@given(four)
def test_the_first_entry_in_the_order_of_computing_is_named(found):
    """The data come first: a forward that got other samples gives other gradients too."""
    first, again, *_ = found
    different = [name for name in NAMES if first.entries[name] != again.entries[name]]
    verdict = verdict_of(found)
    assert (verdict.first, verdict.different, verdict.entries) == (different[0], len(different), len(NAMES))


def test_an_entry_that_one_of_the_two_lacks_differs():
    """As a gradient that a layer gives at one call and not at the next."""
    verdict = verdict_of(tuple(map(Evidence, ({"a": "1"}, {"a": "1", "b": "2"}, {"a": "1"}, {"a": "1"}))))
    assert (verdict.culprit, verdict.first) == (Culprit.AUDITOR, "b")


@given(st.sets(st.integers(0, 12), min_size=1).map(sorted))
def test_every_rank_audits_one_rank_and_is_audited_by_one(ranks):
    """A ring of the ranks that have shards: the two functions are each other's inverse."""
    assert sorted(audited_by(rank, ranks) for rank in ranks) == ranks
    assert all(auditor_of(audited_by(rank, ranks), ranks) == rank for rank in ranks)


@given(st.integers(0, 2**63 - 1), st.integers(1, 9), st.integers(0, 12))
def test_each_shard_of_a_rank_is_audited_in_some_step(seed, world_size, spare):
    """Whatever the seed: a fault of one shard would else never be found."""
    shards = world_size + spare
    for rank in range(world_size):
        own = span(shards, world_size, rank)
        assert {audited_shard(seed, step, own) for step in range(1, 60 * len(own) + 60)} == set(own)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("abcd", "rank 2 and again by rank 1"),
        ("abcd", "remembers what was before"),
        ("abab", "an initialisation by the first data that a rank sees"),
        ("abbb", "rank 2 (node n2) computed it once in a way that three other computations"),
        ("abaa", "rank 1 (node n1) computed it once in a way that three other computations"),
    ],
)
def test_the_sentence_says_who_and_what_usually_does_it(found, expected):
    """Each letter is what one of the computations gave: owner, auditor, owner, auditor."""
    place = Audited(step=40, shard=5, owner=2, auditor=1, owner_node="n2", auditor_node="n1")
    text = sentence(place, verdict_of(of_one("the gradient of m.weight", found)))
    assert text.startswith("step 40, shard 5")
    assert "the gradient of m.weight" in text
    assert expected in text


def test_where_gradients_alone_differ_the_backward_is_named():
    """A hook that counts its calls. Where what was returned differs, it is the forward."""
    audited = Audited(step=4, shard=0, owner=0, auditor=0, owner_node="n", auditor_node="n")
    text = sentence(audited, verdict_of(of_one("the gradient of m.weight", "abcd")))
    assert "something in the backward, such as a hook, remembers" in text
    text = sentence(audited, verdict_of(of_one("what call 1 returned", "abcd")))
    assert "The function remembers something from call to call" in text


def test_other_data_are_the_data_sets_fault():
    """Here no advice about the forward would help."""
    place = Audited(step=4, shard=0, owner=0, auditor=0, owner_node="n", auditor_node="n")
    text = sentence(place, verdict_of(of_one(DATA, "abcd")))
    assert "again on the same rank" in text
    assert "The data set, or collate, gave something else for the same samples" in text


@given(four)
def test_what_came_before_is_said_to_be_either(found):
    """Three of four agree, and the same came in the generation before, as many steps after its
    beginning: a machine that is often wrong, or a function with a memory. No node is named.
    """
    place = Audited(step=4, shard=0, owner=0, auditor=1, owner_node="n0", auditor_node="n1")
    once, again = verdict_of(found), verdict_of(found, is_redo=True)
    assert again.came_again == (once.culprit is not Culprit.RECIPE)
    text = sentence(place, again)
    assert "n0" not in text and "n1" not in text
    if again.came_again and again.first != DATA:
        assert "a machine that is often wrong" in text
