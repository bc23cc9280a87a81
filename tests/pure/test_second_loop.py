"""A second loop is announced where the text surely has one, and nowhere else."""

from pathlib import Path

import pytest

from elastic.agent.second_loop import lines_of_calls, note, refuse
from elastic.errors import UsageError

START = "import elastic\nrun = elastic.start(seed=0)\n"
LOOP = "for step in run.steps(data, state):\n    step.mean_loss(f)\n"


def indented(text):
    return "".join(f"    {line}\n" for line in text.splitlines())


SECOND = {
    "one after another": START + LOOP + LOOP,
    "in a function": "import elastic\ndef main():\n"
    + indented("run = elastic.start()\n" + LOOP + LOOP)
    + "main()\n",
    "of a run that a function is given": START + "def train(run):\n" + indented(LOOP + "\n" + LOOP),
    "under the guard": START + "if __name__ == '__main__':\n" + indented(LOOP + LOOP),
    "inside a block with": START + "with open('x') as file:\n" + indented(LOOP) + LOOP,
    "for each phase": START + "for phase in phases:\n" + indented(LOOP),
    "after an early stop": START + LOOP + "    if step.number > 3:\n        break\n" + LOOP,
    "with the iterators in variables": START + "a = run.steps(d, s)\nb = run.steps(d, s)\n",
    "after a check that raises": START + LOOP + "if bad:\n    raise ValueError\n" + LOOP,
    "start by its name": "from elastic import start\nrun = start()\n" + LOOP + LOOP,
}
ONE = {
    "one loop": START + LOOP,
    "either branch": START + "if pretrain:\n" + indented(LOOP) + "else:\n" + indented(LOOP),
    "conditions that exclude each other": START
    + "if phase == 'a':\n"
    + indented(LOOP)
    + "if phase == 'b':\n"
    + indented(LOOP),
    "the first may be skipped": START + "if pretrain:\n" + indented(LOOP) + LOOP,
    "one function for each phase": START
    + "def a(run):\n"
    + indented(LOOP)
    + "def b(run):\n"
    + indented(LOOP),
    "a return between": START + "def a(run):\n" + indented(LOOP + "if done:\n    return\n" + LOOP),
    "an exit between": START + LOOP + "sys.exit()\n" + LOOP,
    "an exit in a branch": START + "if evaluate:\n" + indented(LOOP + "exit()\n") + LOOP,
    "a return in the loop": START + "def a(run):\n" + indented(LOOP + "    return\n" + LOOP),
    "the first phase alone": START + "for phase in phases:\n" + indented(LOOP) + "    break\n",
    "the cases of a match": START
    + "match a:\n    case 1:\n"
    + indented(indented(LOOP))
    + "    case 2:\n"
    + indented(indented(LOOP)),
    "after a failure": START + "try:\n" + indented(LOOP) + "except ValueError:\n" + indented(LOOP),
    "another object": START + LOOP + "for step in schedule.steps(data, state):\n    pass\n",
    "in a lambda": START + LOOP + "again = lambda: run.steps(data, state)\n",
    "no Python": "for",
}


@pytest.mark.parametrize("text", SECOND.values(), ids=SECOND)
def test_a_second_loop_is_announced(text):
    lines = lines_of_calls(text.encode())
    assert len(lines) == 2
    assert all("run.steps" in text.splitlines()[line - 1] for line in lines)


@pytest.mark.parametrize("text", ONE.values(), ids=ONE)
def test_what_may_be_one_loop_is_not_announced(text):
    """A note that is wrong would teach people to read past it."""
    assert lines_of_calls(text.encode()) == []


PHASES = "def first(run):\n" + indented(LOOP) + "def second(run):\n" + indented(LOOP)
CERTAIN = {
    name: SECOND[name]
    for name in (
        "one after another",
        "in a function",
        "under the guard",
        "inside a block with",
        "after an early stop",
        "with the iterators in variables",
        "after a check that raises",
        "start by its name",
    )
} | {
    "a function for each phase, both called": START + PHASES + "first(run)\nsecond(run)\n",
    "one function, called twice": START
    + "def train(run):\n"
    + indented(LOOP)
    + "train(run)\ntrain(run=run)\n",
    "from main, under the guard": START
    + PHASES
    + "def main():\n    first(run)\n    if 1:\n        print()\n    second(run)\n"
    + "if __name__ == '__main__':\n    main()\n",
}
UNCERTAIN = ONE | {
    "of a function that is not called": SECOND["of a run that a function is given"],
    "for phases that may be one": SECOND["for each phase"],
    "a function that is called in a branch": START + PHASES + "first(run)\nif go_on:\n    second(run)\n",
    "a function that is given something else": START + PHASES + "first(run)\nsecond(other)\n",
    "a function that may return": START
    + "def train(run):\n    if no:\n        return\n"
    + indented(LOOP)
    + "train(run)\ntrain(run)\n",
    "a function between that may exit": START
    + "def end():\n    if done:\n        raise SystemExit\n"
    + LOOP
    + "end()\n"
    + LOOP,
    "a function that calls itself": START
    + "def train(run):\n    train(run)\n"
    + indented(LOOP)
    + "train(run)\n",
    "a generator": START + "def train(run):\n" + indented(LOOP) + "    yield\ntrain(run)\ntrain(run)\n",
}


@pytest.mark.parametrize("text", CERTAIN.values(), ids=CERTAIN)
def test_a_script_that_surely_comes_to_a_second_loop_is_refused(text):
    with pytest.raises(UsageError, match=r"expected one loop over run\.steps in r\.py, found one in") as said:
        refuse(Path("r.py"), text.encode())
    assert "elastic-train SECOND_RECIPE --from runs/first --run-dir runs/second" in str(said.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("one after another", "found one in line 3 and another one in line 5: a run"),
        ("one function, called twice", "found one in line 4, to which the script comes twice: a run"),
    ],
)
def test_the_refusal_names_two_lines_or_the_one_that_comes_twice(name, says):
    """It was "one in line 4 and another one in line 4"."""
    with pytest.raises(UsageError, match=says):
        refuse(Path("r.py"), CERTAIN[name].encode())


@pytest.mark.parametrize("text", UNCERTAIN.values(), ids=UNCERTAIN)
def test_a_script_that_may_have_one_loop_is_not_refused(text):
    refuse(Path("r.py"), text.encode())


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[2].glob("recipes/*.py")), ids=lambda path: path.name
)
def test_the_recipes_have_one_loop(path):
    assert lines_of_calls(path.read_bytes()) == []


def test_the_note_names_the_lines_and_the_command_that_goes_on():
    said = note(Path("r.py"), (START + LOOP + LOOP).encode(), "runs/r")
    assert said.startswith("r.py calls run.steps in line 3 and again in line 5: a run is one loop")
    assert said.endswith("elastic-train SECOND_RECIPE --from runs/r --run-dir NEW")
    assert "again and again in line 4" in note(Path("r.py"), SECOND["for each phase"].encode(), "runs/r")
    assert note(Path("r.py"), (START + LOOP).encode(), "runs/r") == ""
