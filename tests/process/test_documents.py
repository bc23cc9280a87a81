"""What users copy is exact: each script of examples/, and the ported one of docs/porting.md."""

import csv
import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GUIDE = ROOT / "docs" / "porting.md"
PORTED = re.compile(r"^```python recipe\n(.*?)^```", re.MULTILINE | re.DOTALL)
# In the place of W&B: a recipe imports from its own folder first.
WANDB = """
import json
from pathlib import Path

class Run:
    id = "begun"

def note(*words):
    with Path(__file__).with_name("calls").open("a") as calls:
        calls.write(json.dumps(words) + "\\n")

def init(id, **_named):
    note("init", id)
    return Run()

def log(record, step):
    note("log", step)
"""


@pytest.mark.parametrize("source", [GUIDE, *EXAMPLES], ids=lambda path: path.stem)
def test_code_of_the_porting_guide_is_exact_where_a_worker_dies(source, drills, tmp_path):
    """Two workers, one of which is killed in its seventh step, end as one calm worker does. What
    comes of it begins the fine-tuning, as the head of that example says.
    """
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
    if source.stem == "tracker":
        with (stormy.run.local / "steps.csv").open(newline="") as table:
            steps = [int(step) for step, *_ in csv.reader(table)]
        # Rank 0 may be killed between the line of the sixth step and its report.
        assert steps == [step for step in range(1, expected[0] + 1) if step != 6 or 6 in steps]
    if source.stem == "classification":
        tuned = drills(tmp_path / "tuned")
        tuning = ROOT / "examples" / "fine_tuning.py"
        tuned.start("--from", f"{calm.run.url}:model", recipe=tuning).ends_with(0)
        assert tuned.values("restored", "source") == [("parent",)]


def test_the_wandb_example_logs_each_step_once(drill, tmp_path):
    """A kill costs the steps since the checkpoint of step 4."""
    (tmp_path / "wandb.py").write_text(WANDB)
    recipe = tmp_path / "recipe.py"
    recipe.write_text((ROOT / "examples" / "tracker.py").read_text())
    options = ("--snapshot-every", "off", "--faults", "step 7 rank 0 backward: kill")
    drill.start(*options, recipe=recipe, arguments=("--tracker", "wandb")).ends_with(0)
    said = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [word for call, word in said if call == "init"] == [None, "begun"]
    assert [word for call, word in said if call == "log"] == list(range(1, drill.last_step + 1))


def test_the_guide_lists_each_example_the_readme_the_quickstart():
    listed = re.findall(r"\]\(\.\./examples/(\w+)\.py\)", GUIDE.read_text())
    assert set(listed) == {path.stem for path in EXAMPLES}
    _, code = (ROOT / "recipes" / "quickstart.py").read_text().split('"""\n\n')
    assert code in (ROOT / "README.md").read_text()
