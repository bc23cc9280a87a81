"""A NameError after a loop that had no step left to do says what happened to the variable."""

import pytest

from elastic.train.unset_variable import explain_unset

LOOP = "for step in []:\n    loss = step\n"


def explained(text):
    with pytest.raises(NameError) as raised:
        exec(compile(text, "recipe.py", "exec"), {})
    return explain_unset(raised.value, 12)


@pytest.mark.parametrize(
    "text",
    [
        LOOP + "print(loss)",
        "def main():\n    for step in []:\n        loss = step\n    print(loss)\nmain()",
        "def show():\n    print(loss)\n" + LOOP + "show()",
    ],
)
def test_a_variable_that_the_loop_sets_is_explained_at_its_line(text):
    """At the top of a script, in a function, and as a global that a function reads."""
    error = explained(text)
    assert str(error).startswith("'loss' has no value after the loop, which sets it: all 12 steps are done")
    assert error.__traceback__ is not None


def test_a_name_that_nothing_sets_stays_the_error_that_it_is():
    assert explained(LOOP + "print(lost)") is None
    assert explain_unset(ValueError("'loss'"), 12) is None
