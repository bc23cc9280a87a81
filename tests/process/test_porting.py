"""What users copy is exact: each script of examples/, and the ported one of docs/porting.md."""

import csv
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GUIDE = ROOT / "docs" / "porting.md"
PORTED = re.compile(r"^```python recipe\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("source", [GUIDE, *EXAMPLES], ids=lambda path: path.stem)
def test_code_of_the_porting_guide_is_exact_where_a_worker_dies(source, drills, tmp_path):
    """Two workers, one of which is killed in its seventh step, end as one calm worker does."""
    text = source.read_text()
    recipe = tmp_path / "recipe.py"
    recipe.write_text(PORTED.findall(text)[0] if source == GUIDE else text)
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    faults = ("--snapshot-every", "1", "--faults", "step 7 rank 1 backward: kill")
    agents = [
        calm.start(recipe=recipe),
        stormy.start("--nproc-per-node", "2", *faults, recipe=recipe),
    ]
    for agent in agents:
        agent.ends_with(0)

    assert len(stormy.events("fault_injected")) == 1
    (expected,), (found,) = (each.values("run_finished", "steps", "digest") for each in (calm, stormy))
    assert found == expected
    assert calm.inspects("diff", calm.run.url, stormy.run.url)[0] == 0
    if source.stem == "tracker":
        with (stormy.run.local / "steps.csv").open(newline="") as table:
            steps = [int(step) for step, *_ in csv.reader(table)]
        # Rank 0 may be killed between the line of the sixth step and its report.
        assert steps == [step for step in range(1, expected[0] + 1) if step != 6 or 6 in steps]


def test_fine_tuning_begins_with_the_weights_of_classification(drills, tmp_path):
    """As the head of the example says; `--from` ends with 2 where an entry does not fit."""
    trained, tuned = drills(tmp_path / "trained"), drills(tmp_path / "tuned")
    trained.start(recipe=ROOT / "examples" / "classification.py").ends_with(0)
    tuned.start("--from", f"{trained.run.url}:model", recipe=ROOT / "examples" / "fine_tuning.py").ends_with(
        0
    )
    assert tuned.values("restored", "source") == [("parent",)]


def test_the_guide_lists_each_example_and_the_readme_shows_the_quickstart():
    listed = re.findall(r"\]\(\.\./examples/(\w+)\.py\)", GUIDE.read_text())
    assert set(listed) == {path.stem for path in EXAMPLES}
    _, code = (ROOT / "recipes" / "quickstart.py").read_text().split('"""\n\n')
    assert code in (ROOT / "README.md").read_text()
