"""The code that users copy is what it says: each script of examples/, the ported one of
docs/porting.md, and that of docs/rules.md, whose wrong code is found.
"""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GUIDE = ROOT / "docs" / "porting.md"
PORTED = re.compile(r"^```python recipe\n(.*?)^```", re.MULTILINE | re.DOTALL)
RULES = (ROOT / "docs" / "rules.md").read_text()
BLOCK = re.compile(r"^```python (header|right|wrong: [\w ]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
REHEARSE = ("--rehearse", "8")  # by `auto` none comes where a start takes over five seconds


def codes(kind):
    """(rest of the mark, whole script) of the blocks of a kind in the rules."""
    blocks = BLOCK.findall(RULES)
    header = next(code for mark, code in blocks if mark == "header")
    return [
        (mark.partition(": ")[2], code if "elastic.start" in code else header + code)
        for mark, code in blocks
        if mark.startswith(kind)
    ]


def shorter(code):
    """Enough steps for the kill, and for a later epoch where the code looks at epochs."""
    epochs = 3 if "step.epoch" in code else 2 if "ends_epoch" in code else 1
    code = re.sub(r"epochs=[34]\b", f"epochs={epochs}", code)
    return re.sub(r"steps=\d+", "steps=16", code).replace("epochs=6", "epochs=3")


EXACT = {path.stem: shorter(path.read_text()) for path in EXAMPLES}
EXACT |= {"porting": PORTED.findall(GUIDE.read_text())[0]}
EXACT |= {f"rules-{place}": code for place, (_, code) in enumerate(codes("right"))}


@pytest.fixture
def recipe(tmp_path):
    return tmp_path / "recipe.py"


@pytest.mark.parametrize("name", EXACT)
def test_code_of_the_documents_is_exact_where_a_worker_dies(name, drills, recipe, tmp_path):
    """Two workers, one of which is killed in its seventh step, end as one calm process of plain
    python does, or for the rules as a worker that is rehearsed. What comes of the classification
    begins the fine-tuning, as the head of that example says.
    """
    recipe.write_text(EXACT[name])
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    faults = ("--snapshot-every", "1", "--faults", "step 7 rank 1 backward: kill")
    if name.startswith("rules"):
        alone = calm.start(*REHEARSE, recipe=recipe)
    else:
        alone = calm.start_script(recipe, env={"ELASTIC_RUN_DIR": calm.run.url})
    agents = [alone, stormy.start("--nproc-per-node", "2", *faults, recipe=recipe)]
    for agent in agents:
        agent.ends_with(0)

    assert len(stormy.events("fault_injected")) == 1
    (expected,), (found,) = (each.values("run_finished", "steps", "digest") for each in (calm, stormy))
    assert found == expected
    if name.startswith("rules"):
        assert set(calm.values("rehearsed", "verdict")) == {("alike",)}
    if name == "tracker":
        with (stormy.run.local / "steps.csv").open(newline="") as table:
            steps = [int(step) for step, *_ in csv.reader(table)]
        # Rank 0 may be killed between the line of the sixth step and its report.
        assert steps == [step for step in range(1, expected[0] + 1) if step != 6 or 6 in steps]
    if name == "classification":
        tuned = drills(tmp_path / "tuned")
        tuning = ROOT / "examples" / "fine_tuning.py"
        tuned.start("--from", f"{calm.run.url}:model", recipe=tuning).ends_with(0)
        assert tuned.values("restored", "source") == [("parent",)]


def test_the_guide_lists_each_example_the_readme_the_quickstart():
    listed = re.findall(r"\]\(\.\./examples/(\w+)\.py\)", GUIDE.read_text())
    assert set(listed) == {path.stem for path in EXAMPLES}
    _, code = (ROOT / "recipes" / "quickstart.py").read_text().split('"""\n\n')
    assert code in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(("found", "code"), codes("wrong"))
def test_wrong_code_is_found(found, code, drills, recipe, tmp_path):
    one = drills(tmp_path / "one")
    recipe.write_text(code)
    agent = one.start(*REHEARSE, recipe=recipe)
    if found == "exit 2":
        agent.ends_with(2)
    elif found == "other weights":  # an overlap finds it: test_step_again.py
        two = drills(tmp_path / "two")
        for each in (agent, two.start("--nproc-per-node", "2", recipe=recipe)):
            each.ends_with(0)
        assert one.values("run_finished", "digest") != two.values("run_finished", "digest")
    else:
        agent.ends_with(1)
        assert one.events(found)


def test_the_rules_have_the_code_that_is_tested():
    """A fence that lost its mark would not be run, and no test would fail."""
    assert RULES.count("\n```python") == len(BLOCK.findall(RULES))
    assert (len(codes("wrong")), len(codes("right"))) == (5, 4)
