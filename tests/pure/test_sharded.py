"""Rows of gradients add up to the tree's sum, a norm does not depend on ranks, and structure is
refused.
"""

import random
from functools import partial, reduce
from operator import add

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import elastic
from elastic.errors import UsageError
from elastic.reduce.tree import Stack, fold
from elastic.train.sharded import optimizers
from elastic.train.sharded.clip import halves
from elastic.train.sharded.sums import Computation, ModuleSums, rounds, strides, words_of

WORLDS = st.integers(1, 40).flatmap(lambda shards: st.tuples(st.just(shards), st.integers(1, shards)))


@given(WORLDS, st.booleans(), st.booleans())
def test_each_shard_is_computed_once_in_equal_rounds(world, is_reversed, is_dealt_anew):
    shards, size = world
    spans = strides(shards, size)[:: -1 if is_dealt_anew else 1]
    dealt = rounds(spans, is_reversed=is_reversed)
    of_ranks = [[shard for shard in each if shard < shards] for each in zip(*dealt, strict=True)]
    assert of_ranks == [list(each[::-1] if is_reversed else each) for each in spans]
    assert len(dealt) == -(-shards // size)


@given(WORLDS, st.booleans(), st.randoms(use_true_random=False))
def test_the_sum_of_rows_is_that_of_the_tree(world, is_reversed, draw):
    """And what waits between two rounds is of the order of the tree's depth."""
    shards, size = world
    leaves = [torch.tensor([draw.uniform(-1e3, 1e3), draw.choice([-0.0, 1e-30])]) for _ in range(shards)]
    tree = Stack(add)
    for shard, leaf in enumerate(leaves):
        tree.push((shard, 1), leaf.double().float())
    expected = fold(tree.parts, shards, add)

    of = Computation(shards=shards, world_size=size, waiting=None)
    sums = ModuleSums(0, "", [], of)
    dealt = rounds(strides(shards, size), is_reversed=is_reversed)
    output = torch.empty(2)
    for number, of.now in enumerate(dealt):
        of.is_last = number == len(dealt) - 1
        received = torch.cat([torch.full((2,), torch.nan) if s == shards else leaves[s] for s in of.now])
        sums._add(received, output)
        assert of.is_last or len(sums._stack.parts) <= 2 * shards.bit_length() + size
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in sums._stack.parts.values())
    assert output.view(torch.int32).tolist() == expected.view(torch.int32).tolist()


@given(st.integers(1, 20), st.integers(1, 70), st.randoms(use_true_random=False))
def test_halves_add_up_each_row_alike_wherever_it_lies(rows, columns, draw):
    numbers = torch.tensor([[draw.uniform(0, 1e3) for _ in range(columns)] for _ in range(rows)]).double()
    found = halves(numbers)
    torch.testing.assert_close(found, numbers.sum(1))
    first = draw.randrange(rows)
    assert torch.equal(halves(numbers[first:]), found[first:])


def test_clipping_scales_to_the_norm():
    parameters = [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(()))]
    expected = [nn.Parameter(p.detach().clone()) for p in parameters]
    for p, twin in zip(parameters, expected, strict=True):
        p.grad = torch.randn(p.shape)
        twin.grad = p.grad.clone()
    parameters.append(nn.Parameter(torch.ones(2)))  # without a gradient
    norm = elastic.clip_grad_norm_(iter(parameters), 0.5)
    torch.testing.assert_close(norm.float(), torch.nn.utils.clip_grad_norm_(expected, 0.5))
    for p, twin in zip(parameters, expected, strict=False):
        torch.testing.assert_close(p.grad, twin.grad)
    assert elastic.clip_grad_norm_([], 1.0) == 0
    with pytest.raises(UsageError, match="expected a positive max_norm"):
        elastic.clip_grad_norm_(parameters, 0.0)


@given(st.lists(st.integers(0, 255), max_size=50), st.integers(0, 50))
def test_words_of_parts_add_up(numbers, cut):
    cut = 8 * (cut // 8)
    tensor = torch.tensor(numbers, dtype=torch.uint8)
    words = (int.from_bytes(bytes(numbers[i : i + 8]), "little") for i in range(0, len(numbers), 8))
    whole = reduce(add, words, 0)
    assert (words_of(tensor) - whole) % 2**64 == 0
    assert (words_of(tensor[:cut]) + words_of(tensor[cut:]) - whole) % 2**64 == 0


class ByNorm(torch.optim.SGD):
    """As LARS."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad * p.norm() / p.grad.norm())


BY_ELEMENT = "SGD Adam AdamW Adagrad Adadelta RMSprop Rprop NAdam RAdam Adamax ASGD"


@pytest.fixture
def all_are_sharded(monkeypatch):
    monkeypatch.setattr(optimizers, "is_sharded", lambda _: True)


@pytest.mark.parametrize("name", BY_ELEMENT.split())
def test_an_optimizer_by_element_passes(all_are_sharded, name):
    before = random.getstate(), torch.get_rng_state().tolist()
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(3, 2))], lr=0.01)
    torch.optim.lr_scheduler.StepLR(optimizer, 5)
    had = {key: set(of_one) for key, of_one in optimizer.state.items()}
    optimizers.check(optimizer)
    assert {key: set(of_one) for key, of_one in optimizer.state.items()} == had
    assert before == (random.getstate(), torch.get_rng_state().tolist())


OTHERS = ByNorm, torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS
# Kernels whose last numbers are rounded otherwise.
ROUNDED = (partial(torch.optim.AdamW, fused=True), torch.float32), (torch.optim.SGD, torch.bfloat16)


@pytest.mark.parametrize(("make", "dtype"), [*((each, torch.float32) for each in OTHERS), *ROUNDED])
def test_an_optimizer_that_is_not_by_element_is_refused(all_are_sharded, make, dtype):
    parameters = [nn.Parameter(torch.ones(3, 2, dtype=each)) for each in (torch.float64, dtype)]
    with pytest.raises(UsageError, match="expected an optimizer that updates each number by itself"):
        optimizers.check(make(parameters, lr=1e-3))
