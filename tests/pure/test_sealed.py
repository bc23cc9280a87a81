"""A recipe adds no attribute to the run, to a step or to its State."""

import pytest
import torch

import elastic
from elastic.errors import UsageError
from elastic.train.run import Run


@pytest.mark.parametrize(("kind", "word"), [(Run, "run"), (elastic.State, "state")])
def test_an_attribute_that_a_recipe_adds_is_refused_with_what_to_write(kind, word):
    thing = kind.__new__(kind)
    vars(thing)["_is_sealed"] = True  # as its constructor leaves it
    with pytest.raises(UsageError, match=rf"^{word}\.best = .*elastic\.Values\(best="):
        thing.best = 1.0


def test_what_the_library_and_a_subclass_of_the_recipes_assign_is_free():
    class Named(elastic.State):
        def __init__(self, name, **objects):
            super().__init__(**objects)
            self.name = name

    assert Named("a", model=torch.nn.Linear(1, 1)).name == "a"
