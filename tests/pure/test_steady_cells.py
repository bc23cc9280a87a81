"""The table of steady state leaves no value of an axis out, and says which cells it leaves out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steady_cells import (
    CHOSEN,
    EVERY,
    MODELS,
    PRECISIONS,
    SHARDS,
    WIDE,
    WORKERS,
    Cell,
    Side,
    choose,
    in_words,
)
from steady_models import WORKLOADS

MODELS_OF_TIME = [model for model in MODELS if model != WIDE]
each_choice = given(
    takes_all=st.booleans(),
    only=st.lists(st.sampled_from(["*", "gpt-*", "*-bf16", "wide-*", "mlp64-1w-8s-fp32"]), max_size=2),
    gpus=st.integers(0, 4),
)


@pytest.mark.parametrize("model", MODELS_OF_TIME)
def test_each_model_is_in_the_table(model: str):
    assert any(cell.model == model for cell in CHOSEN)


def test_each_value_of_the_other_axes_is_in_the_table_with_more_than_one_model():
    """A value that one model alone has says little of the axis."""
    for name, values in {"workers": WORKERS, "shards": SHARDS, "precision": PRECISIONS}.items():
        for value in values:
            assert len({cell.model for cell in CHOSEN if getattr(cell, name) == value}) > 1, (name, value)


def test_the_table_has_gradients_of_many_shards_and_the_pairs_beside_which_they_are_read():
    names = {cell.name for cell in CHOSEN}
    assert names >= {"mlp64-1w-1s-fp32", "mlp64-1w-8s-fp32", "mlp512-1w-8s-fp32"}
    assert names >= {"resnet18-2w-1s-fp32", "resnet18-2w-4s-fp32"}
    assert names >= {f"wide-1w-{shards}s-fp32" for shards in (1, 8, 32, 256)}


def test_all_is_the_product_of_the_axes_and_what_is_chosen_beside_it():
    assert len({cell.name for cell in EVERY}) == len(EVERY)
    product = len(MODELS_OF_TIME) * len(WORKERS) * len(SHARDS) * len(PRECISIONS)
    beside = [cell for cell in EVERY if cell.model == WIDE or cell.shards not in SHARDS]
    assert len(EVERY) == product + len(beside)
    assert set(CHOSEN) <= set(EVERY)


@each_choice
def test_each_cell_is_measured_or_named_as_left_out(takes_all: bool, only: list[str], gpus: int):
    found = choose(takes_all=takes_all, only=only, gpus=gpus)
    parts = [*found.cells, *found.left_out, *found.too_wide]
    assert len(parts) == len(set(parts))
    if only:
        assert not found.left_out  # they were not asked for
    else:
        assert set(parts) == set(EVERY)
    assert not (takes_all and found.left_out)
    assert all(not gpus or cell.workers <= gpus for cell in found.cells)
    assert all(gpus and cell.workers > gpus for cell in found.too_wide)


def test_a_name_without_a_cell_is_refused_with_all_names():
    with pytest.raises(ValueError, match=r"found 'resnet'.*\n(.*\n)*gpt: .*1w-4s-fp32"):
        choose(takes_all=False, only=["gpt-*", "resnet"], gpus=0)


def test_ours_stands_beside_plain_with_one_worker_and_beside_ddp_with_several():
    for cell in EVERY:
        assert cell.sides[0] is Side.OURS
        assert (Side.PLAIN in cell.sides) is (cell.workers == 1)
        assert Side.DDP in cell.sides or cell.workers == 1
    assert any(cell.workers == 1 and Side.DDP in cell.sides for cell in CHOSEN)


def test_names_and_titles_say_the_same():
    cell = Cell(model="resnet18", workers=2, shards=4, precision="bf16")
    assert cell.name == "resnet18-2w-4s-bf16"
    assert cell.title == "ResNet-18, 32x32, 2 workers, 4 shards each, bf16"
    assert Cell(model="mlp64", workers=1, shards=1).title == "MLP, hidden 64, 1 worker, 1 shard"


def test_what_is_left_out_is_named_model_by_model():
    cells = [cell for cell in EVERY if cell.model in ("gpt", WIDE)]
    lines = in_words(cells)
    assert sorted(line.split(":")[0] for line in lines) == ["gpt", "wide"]
    assert sum(len(line.split()) - 1 for line in lines) == len(cells)


def test_each_model_can_be_built_and_the_gpt_has_ten_million_parameters():
    assert set(WORKLOADS) == set(MODELS)
    assert 9e6 < WORKLOADS["gpt"].gradient_bytes() / 4 < 11e6
    # Memory is counted in its gradients, which must be large beside what two programs differ by.
    assert WORKLOADS[WIDE].gradient_bytes() > 30e6
