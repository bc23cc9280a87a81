"""A line of metrics says what the recipe logged, and how long the step itself took."""

import pytest
import run_records

from elastic.observe.goodput import BETWEEN_STEPS

pytestmark = pytest.mark.process


@pytest.fixture
def report(drill, recipes):
    drill.start(recipe=recipes / "evaluating.py").ends_with(0)
    _, found = drill.inspects("report", drill.run.url)
    return found


def test_an_evaluation_is_time_between_steps_and_no_part_of_one(drill, report):
    """A share of nearly one was reported of a run that did nothing but evaluate."""
    lines = run_records.lines(drill.run.metrics)
    # That of the last step comes before its line, as all do; what is before the first is the start.
    took_s = sum(line["took_s"] for line in lines[1:])

    assert report["badput_s"][BETWEEN_STEPS] >= 0.9 * took_s
    assert all(line["seconds"] >= 0 for line in lines)


def test_a_loss_that_the_recipe_logs_is_the_loss(drill, report):
    """Also where `mean_loss` gave another one: a smoothed loss, or a sum of several."""
    assert [line["loss"] for line in run_records.lines(drill.run.metrics)] == [
        pytest.approx(100.0 + number) for number in range(1, 7)
    ]
