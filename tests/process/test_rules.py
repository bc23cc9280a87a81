"""The code of docs/rules.md is what it says: the right code is exact, the wrong code is found."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "rules.md").read_text()
BLOCK = re.compile(r"^```python (header|right|wrong: [\w ]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
REHEARSE = ("--rehearse", "8")  # by `auto` none comes where a start takes over five seconds


def codes(kind: str) -> list[tuple[str, str]]:
    """(rest of the mark, whole script) of the blocks of a kind."""
    blocks = BLOCK.findall(TEXT)
    header = next(code for mark, code in blocks if mark == "header")
    return [
        (mark.partition(": ")[2], code if "elastic.start" in code else header + code)
        for mark, code in blocks
        if mark.startswith(kind)
    ]


@pytest.fixture
def recipe(tmp_path):
    def write(code: str) -> Path:
        path = tmp_path / "recipe.py"
        path.write_text(code)
        return path

    return write


@pytest.mark.parametrize(("_", "code"), codes("right"))
def test_right_code_is_exact_where_a_worker_dies(_, code, drills, recipe, tmp_path):
    """Two workers, one of which is killed, end as one calm worker that is rehearsed does."""
    path = recipe(code)
    calm, stormy = drills(tmp_path / "calm"), drills(tmp_path / "stormy")
    faults = ("--snapshot-every", "1", "--faults", "step 7 rank 1 backward: kill")
    for agent in (
        calm.start(*REHEARSE, recipe=path),
        stormy.start("--nproc-per-node", "2", *faults, recipe=path),
    ):
        agent.ends_with(0)
    assert len(stormy.events("fault_injected")) == 1
    assert set(calm.values("rehearsed", "verdict")) == {("alike",)}
    assert calm.values("run_finished", "digest") == stormy.values("run_finished", "digest")


@pytest.mark.parametrize(("found", "code"), codes("wrong"))
def test_wrong_code_is_found(found, code, drills, recipe, tmp_path):
    one = drills(tmp_path / "one")
    agent = one.start(*REHEARSE, recipe=recipe(code))
    if found == "exit 2":
        agent.ends_with(2)
    elif found == "other weights":  # an overlap finds it: test_step_again.py
        two = drills(tmp_path / "two")
        for each in (agent, two.start("--nproc-per-node", "2", recipe=tmp_path / "recipe.py")):
            each.ends_with(0)
        assert one.values("run_finished", "digest") != two.values("run_finished", "digest")
    else:
        agent.ends_with(1)
        assert one.events(found)


def test_the_words_of_each_refusal_are_those_of_a_message():
    messages = [
        node.value
        for path in (ROOT / "elastic").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    table = TEXT.partition("| words of the message |")[2].partition("\n## ")[0]
    quoted = [words for row in table.splitlines() for words in re.findall(r"`(.*?)`", row.split("|")[1:2][0])]
    assert len(quoted) > 20
    assert [words for words in quoted if not any(words in each for each in messages)] == []


def test_the_rules_have_the_code_that_is_tested():
    """A fence that lost its mark would not be run, and no test would fail."""
    assert TEXT.count("\n```python") == len(BLOCK.findall(TEXT))
    assert (len(codes("wrong")), len(codes("right"))) == (5, 4)
