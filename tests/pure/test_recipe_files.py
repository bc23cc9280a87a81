"""A file or an event of the recipe's own never takes the place of one of the run's."""

import pytest

from elastic.config.run_dir import OWN_NAMES, RunDir
from elastic.errors import UsageError
from elastic.observe.logged_event import check_event

A_FILE = None


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        (None, A_FILE, "such as 'weights.pth' or 'samples/3.png', found None"),
        (".", A_FILE, "found '.'"),
        ("../weights.pth", A_FILE, "found '../weights.pth'; write files for other places without run.path"),
        ("/tmp/weights.pth", A_FILE, "found '/tmp/weights.pth'"),
        ("a\0b", A_FILE, r"found 'a\x00b'"),
        (min(OWN_NAMES), A_FILE, f"{min(OWN_NAMES)} is the run's own, which a resume reads; take another"),
        (".metrics-000002.jsonl", A_FILE, ".metrics-000002.jsonl is the run's own"),
        ("./checkpoints/mine", A_FILE, "checkpoints is the run's own"),
        (3, {}, "found 3"),
        ("", {}, "found ''"),
        ("run_finished", {"steps": 1}, "found 'run_finished', an event of the run itself"),
        ("probe", {"time": 3.0}, "found the field 'time', which the run itself sets"),
        ("probe", {"best": {1, 2}}, "run.event('probe', best=...): expected numbers, strings, or lists"),
    ],
)
def test_a_name_of_the_run_or_outside_it_is_refused(tmp_path, name, fields, says):
    """Written there, a file would overwrite what a resume reads, or a file of something else. An
    event would be counted by a report; what is no JSON would end the recipe with an error of json.
    """
    with pytest.raises(UsageError) as refused:
        RunDir.parse(str(tmp_path)).of_recipe(name) if fields is A_FILE else check_event(name, fields)
    assert says in str(refused.value)
