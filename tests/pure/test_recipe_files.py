"""A file or an event of the recipe's own never takes the place of one of the run's."""

import pytest

from elastic.config.run_dir import OWN_NAMES, RunDir
from elastic.errors import UsageError
from elastic.observe.logged_event import check_event


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (None, "such as 'weights.pth' or 'samples/3.png', found None"),
        (".", "found '.'"),
        ("../weights.pth", "found '../weights.pth'; write files for other places without run.path"),
        ("/tmp/weights.pth", "found '/tmp/weights.pth'"),
        ("a\0b", r"found 'a\x00b'"),
        (min(OWN_NAMES), f"{min(OWN_NAMES)} is the run's own, which a resume reads; take another"),
        (".metrics-000002.jsonl", ".metrics-000002.jsonl is the run's own"),
        ("./checkpoints/mine", "checkpoints is the run's own"),
    ],
)
def test_a_path_of_the_run_or_outside_it_is_refused(tmp_path, name, says):
    """Written there, it would overwrite what a resume reads, or a file of something else."""
    with pytest.raises(UsageError) as refused:
        RunDir.parse(str(tmp_path)).of_recipe(name)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        (3, {}, "found 3"),
        ("", {}, "found ''"),
        ("run_finished", {"steps": 1}, "found 'run_finished', an event of the run itself"),
        ("probe", {"time": 3.0}, "found the field 'time', which the run itself sets"),
        ("probe", {"best": {1, 2}}, "run.event('probe', best=...): expected numbers, strings, or lists"),
    ],
)
def test_an_event_with_a_name_of_the_runs_own_is_refused(name, fields, says):
    """A report would count it; and what is no JSON would end the recipe with an error of json."""
    with pytest.raises(UsageError) as refused:
        check_event(name, fields)
    assert says in str(refused.value)
