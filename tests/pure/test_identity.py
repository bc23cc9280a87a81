"""A run directory that holds another run is refused, and every difference is named."""

from dataclasses import fields, replace

import pytest
from records import IDENTITY, PARENT

from elastic.config.identity import Identity, check
from elastic.errors import UsageError

OTHER = {
    "recipe": ("eval.py", "recipe: eval.py there, train.py here"),
    "arguments": ((), "recipe arguments: none there, --epochs 3 here"),
    "seed": (2, "seed: 2 there, 1 here"),
    "global_batch": (128, "global batch: 128 there, 64 here"),
    "shards": (4, "shards: 4 there, 8 here"),
    "torch": ("2.12.0", "torch version: 2.12.0 there, 2.11.0 here"),
    "device": ("cuda", "kind of device: cuda there, cpu here"),
    "threads": (4, "threads a worker (OMP_NUM_THREADS): 4 there, 1 here"),
    "format": (1, "format of the run directory: 1 there, 3 here"),
    "parent": (PARENT, f"begins from: {PARENT} there, none here"),
}


@pytest.mark.parametrize("field", OTHER)
def test_one_difference_is_named_and_changes_the_run_id(field):
    """One field at a time: its name, both values, and what to do."""
    value, words = OTHER[field]
    there = replace(IDENTITY, **{field: value})
    with pytest.raises(UsageError) as caught:
        check(there, IDENTITY, "runs/x")
    for part in (f"runs/x holds another run ({words});", "--from runs/x --run-dir NEW", "--fresh"):
        assert part in str(caught.value)
    assert there.run_id != IDENTITY.run_id


def test_every_field_except_the_hash_of_the_recipe_is_compared():
    """A new field belongs in this table, or here if the result does not depend on it."""
    assert {field.name for field in fields(Identity)} - OTHER.keys() == {"recipe_sha256"}


@pytest.mark.parametrize(
    ("field", "other"), [("run_id", "f" * 16), ("step", 41), ("digest", "56" * 32), ("entries", ())]
)
def test_another_state_to_begin_from_is_another_run(field, other):
    """Each of what makes the state: two runs from states that differ are never taken for one."""
    ours = replace(IDENTITY, parent=PARENT)
    there = replace(IDENTITY, parent=replace(PARENT, **{field: other}))
    assert there.run_id != ours.run_id
    with pytest.raises(UsageError, match=r"begins from: step 4. of /runs/first"):
        check(there, ours, "runs/x")


def test_an_edited_recipe_and_a_moved_parent_are_the_same_run():
    """Fixing a bug and resuming is the user's decision; nodes may mount the parent elsewhere."""
    ours = replace(IDENTITY, parent=PARENT)
    same = replace(ours, recipe_sha256="cd" * 32, parent=replace(PARENT, url="s3://bucket/first"))
    check(same, ours, "runs/x")
    assert same.run_id == ours.run_id
