"""What docs/porting.md tells its readers to write is exact: every piece of its code is run here."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

TEXT = (Path(__file__).parents[2] / "docs" / "porting.md").read_text()
BLOCK = re.compile(r"^```python (recipe|header|habit)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^##+ (.+)$", re.MULTILINE)

# The frozen weights are those that the other run ended with.
AFTERWARDS = """
import sys
from pathlib import Path
from safetensors.torch import load_file
newest = max(Path(sys.argv[1]).glob("checkpoints/*/*/state.safetensors"))
weights = [w for name, w in load_file(newest).items() if name.startswith("model.")]
there = {tuple(w.shape): w for w in weights}
run.path("same").write_text(str(all(torch.equal(there[tuple(p.shape)], p) for p in model.parameters())))
"""


def recipes() -> dict[str, str]:
    """Whole recipes by the heading that they stand under; habits begin with the header."""
    found, header = {}, ""
    for block in BLOCK.finditer(TEXT):
        heading = [*HEADING.finditer(TEXT, 0, block.start())]
        name = heading[-1].group(1) if heading else "the ported script"
        kind, code = block.groups()
        if kind == "header":
            header = code
            continue
        number = sum(known.startswith(name) for known in found)
        found[f"{name} {number + 1}" if number else name] = code if kind == "recipe" else header + code
    return found


@pytest.mark.parametrize("habit", recipes())
def test_code_of_the_porting_guide_is_exact_where_a_worker_dies(habit, drills, tmp_path):
    """Two workers, one of which is killed in its seventh step, end as one calm worker does."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(recipes()[habit])
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")

    has_backward = "step.mean_loss" in recipes()[habit] or "step.backward" in recipes()[habit]
    point = "backward" if has_backward else "forward"
    plan = ("--snapshot-every", "1", "--faults", f"step 7 rank 1 {point}: kill")
    agents = [
        calm.start(recipe=recipe),
        stormy.start("--nproc-per-node", "2", *plan, recipe=recipe),
    ]
    for agent in agents:
        agent.ends_with(0)

    assert len(stormy.events("fault_injected")) == 1
    (expected,), (found,) = (each.values("run_finished", "steps", "digest") for each in (calm, stormy))
    assert found == expected
    assert calm.inspects("diff", calm.run.url, stormy.run.url)[0] == 0


def test_the_guide_has_the_code_that_is_tested():
    """A fence that lost its mark would not be run, and no test would fail."""
    marked = len(BLOCK.findall(TEXT))

    assert TEXT.count("\n```python") == marked + 1, "only the script to be ported is not run"
    assert len(recipes()) == marked - 1


def test_adapters_begin_with_the_frozen_weights_of_another_run(drills, tmp_path):
    """`--from RUN:model`, as the guide says: the model keeps the names that it was trained with."""
    recipe, trained, adapted = (
        tmp_path / "recipe.py",
        drills(tmp_path / "trained"),
        drills(tmp_path / "adapted"),
    )
    recipe.write_text(recipes()["Several losses"])
    trained.start(recipe=recipe).ends_with(0)
    recipe.write_text(recipes()["Adapters on frozen weights (LoRA)"] + AFTERWARDS)
    adapted.start(
        "--from", f"{trained.run.url}:model", recipe=recipe, arguments=(trained.run.url,)
    ).ends_with(0)
    assert (adapted.run.local / "same").read_text() == "True"
