"""The note about unsaved variables begins with those on which the result may depend."""

import pytest

from elastic.train.object_marks import Kind, Mark, mark_of
from elastic.train.object_parts import FREE
from elastic.train.unsaved_names import Standing, in_order, standing, variable_of


def container(length, items=()):
    return Mark(kind=Kind.PLAIN, value=(length, tuple(items)), rules=FREE, owner="list")


def number(value):
    return mark_of(value, FREE)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("history[3]['loss'][0]", "history"),
        ("self.meter.counts['a']", "self.meter.counts"),
        ("best", "best"),
        ("[0]", "[0]"),
    ],
)
def test_a_variable_has_one_name_however_many_items_change(path, name):
    assert variable_of(path) == name


@pytest.mark.parametrize(
    ("path", "before", "now", "expected"),
    [
        ("best", number(1.0), number(2.0), Standing.NUMBER),
        ("scale", number(1.0), number(2.0), Standing.READ),
        ("scale.value", number(1.0), number(2.0), Standing.READ),
        ("history", container(1, ["1.0"]), container(2, ["1.0", "0.5"]), Standing.SHOWN),
        ("records", container(3), container(4), Standing.SHOWN),
        ("recent", container(2, ["1.0", "0.5"]), container(3, ["0.5", "0.2"]), Standing.NUMBER),
        ("recent", container(2, ["1.0"]), container(2, ["0.5"]), Standing.NUMBER),
        ("scale", container(1, ["1"]), container(2, ["1", "2"]), Standing.SHOWN),
        ("title", number("a"), number("b"), Standing.SHOWN),
        ("found", None, container(2), Standing.NUMBER),
    ],
)
def test_what_only_grows_and_texts_stand_behind_numbers(path, before, now, expected):
    """A window of the last values loses some, and does not only grow."""
    assert standing(path, before, now, {"scale"}) is expected


def test_a_variable_stands_where_its_least_shown_part_does():
    """A list of records grows; in one record a number changes, which may be computed with."""
    found = {
        "log": Standing.SHOWN,
        "history": Standing.SHOWN,
        "best": Standing.NUMBER,
        "history[0]['n']": Standing.NUMBER,
        "scale": Standing.READ,
    }
    assert list(in_order(found)) == ["scale", "history", "best", "log"]
