"""Four computations of one shard tell a machine that erred once from a recipe that is not exact."""

from hypothesis import given
from hypothesis import strategies as st

from elastic.proof.evidence import Evidence
from elastic.proof.verdict import DATA, Audited, audited_shard, auditor_of
from elastic.reduce.tree import span

NAMES = [DATA, "what call 1 of the step returned", "the buffer m.mean", "the gradient of m.weight"]
evidence = st.tuples(*[st.sampled_from(["a", "b"])] * len(NAMES)).map(
    lambda found: Evidence(dict(zip(NAMES, found, strict=True)))
)
four = st.tuples(evidence, evidence, evidence, evidence).filter(lambda found: found[0] != found[1])


def audited(found, **fields):
    """The nodes are n2, of the owner, and n1."""
    first, again, owners_second, auditors_second = found
    values = {"step": 40, "shard": 5, "owner": 2, "auditor": 1, "nodes": ("n2", "n1")}
    return Audited(
        first=first,
        again=again,
        owners_second=owners_second,
        auditors_second=auditors_second,
        **values | {"came_before": False, "has_copies": False} | fields,
    )


@given(four)
def test_a_machine_is_blamed_where_three_of_four_agree(found):
    """Beside a dumb twin: sort the four by what they found, and look for one against three."""
    alone = [i for i in range(4) if [other == found[i] for other in found].count(True) == 1]
    agree = len({repr(each) for each in found}) == 2 and len(alone) == 1
    assert audited(found).node == ({0: "n2", 1: "n1"}.get(alone[0]) if agree else None)


@given(four)
def test_no_machine_is_blamed_for_data_of_loading_processes(found):
    """The owner's samples came from such a process, and the three others from a dataset that the
    loop has changed since: three of four agree.
    """
    same_data = found[0].entries[DATA] == found[1].entries[DATA]
    assert audited(found, has_copies=True).node == (audited(found).node if same_data else None)


@given(four)
def test_the_first_entry_in_the_order_of_computing_is_named(found):
    """The data come first: a forward that got other samples gives other gradients too."""
    first, again, *_ = found
    different = [name for name in NAMES if first.entries[name] != again.entries[name]]
    assert audited(found).different == different
    assert f"differs is {different[0]}, {len(different)} of {len(NAMES)}" in audited(found).sentence()


@given(st.integers(1, 12))
def test_every_rank_audits_one_rank_and_is_audited_by_one(ranks):
    """A ring, of one rank too."""
    assert sorted(auditor_of(rank, ranks) for rank in range(ranks)) == list(range(ranks))


@given(st.integers(0, 2**63 - 1), st.integers(1, 9), st.integers(0, 12))
def test_each_shard_of_a_rank_is_audited_in_some_step(seed, world_size, spare):
    """Whatever the seed: a fault of one shard would else never be found."""
    shards = world_size + spare
    for rank in range(world_size):
        own = span(shards, world_size, rank)
        assert {audited_shard(seed, step, own) for step in range(1, 60 * len(own) + 60)} == set(own)
