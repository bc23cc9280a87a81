"""Which variables a loop carries from pass to pass, found in its bytecode."""

import sys
import textwrap
from contextlib import nullcontext, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.train.liveness import Variable, globals_needed, live_after


def live_in(body, after="", mentions=None, head="for step in source:", before=""):
    """Of a function whose loop has this body, at the step that it takes first."""
    lines = ["def function(source):"]
    lines += textwrap.indent(before, "    ").splitlines()
    lines += ["    " + head, *textwrap.indent(body, "        ").splitlines()]
    lines += textwrap.indent(after, "    ").splitlines()
    space = {"__name__": "recipe", "FOUND": []}
    exec(compile("\n".join(lines), "recipe.py", "exec"), space)

    def source():
        frame = sys._getframe(1)
        while frame.f_code.co_name != "function":
            frame = frame.f_back
        reads = mentions or {}
        found = live_after(
            frame.f_code,
            frame.f_lasti,
            "recipe",
            lambda each: [Variable("recipe", name) for name in reads.get(each.name, ())],
        )
        space["FOUND"].append(found)
        yield from ()

    with suppress(NameError, TypeError):  # the text is analysed, and hardly runs
        space["function"](source())
    return space["FOUND"][0]


def names(variables):
    return {each.name for each in variables}


def test_a_variable_that_a_pass_reads_before_it_writes_is_carried():
    body = "if value < best:\n    best = value\nvalue = make(step)\nloss = value"
    found = live_in(body, before="best = value = 0")
    assert {"best", "value"} <= names(found.carried)
    assert not {"loss", "step"} & names(found.carried)


def test_a_variable_that_each_pass_writes_first_is_not_carried():
    found = live_in("total = 0\nfor x in step:\n    total += x\nprint(total)")
    assert not {"total", "x"} & names(found.carried)


@pytest.mark.parametrize(
    "made", ["[p for p in step]", "{p: 1 for p, q in step}", "[[p for p in q] for q in step]"]
)
def test_a_variable_that_a_comprehension_hides_for_a_while_is_carried(made):
    """Since Python 3.12 it runs in the function, and gives the variable its value back."""
    found = live_in(f"norms = {made}\nuse(norms)\np = p + 1.0", before="p = q = 0")
    assert "p" in names(found.carried)
    assert "norms" not in names(found.carried)


def test_what_a_comprehension_is_assigned_to_is_not_carried_where_it_has_its_own_variable_of_that_name():
    found = live_in("x = [x for x in step]\nuse(x)", before="x = 0", after="print(1)")
    assert "x" not in names(found.carried)


ONE_BRANCH = "if step:\n    best = step\nloss = step"


@pytest.mark.parametrize("reads", ["", "\nif step > 1:\n    use(best)"])
def test_what_the_loop_alone_writes_is_not_carried(reads):
    """A process that resumes has the last value that was written, or fails by a NameError."""
    found = live_in(ONE_BRANCH + reads, after="print(best, loss, step)")
    assert "best" not in names(found.carried | found.after_loop)
    assert names(found.in_some) == {"best"}


def test_what_had_a_value_before_the_loop_and_is_written_by_one_branch_is_carried():
    """A process that resumes would silently have the value from before the loop."""
    found = live_in(ONE_BRANCH, after="print(best, loss)", before="best = None")
    assert "best" in names(found.carried)
    assert not found.after_loop


def test_what_each_pass_writes_is_of_note_after_the_loop_if_it_had_a_value_before():
    """With no pass left to do, that value would be there again; else the last pass sets it."""
    found = live_in(ONE_BRANCH, after="print(loss, step)", before="loss = None")
    assert "loss" not in names(found.carried)
    assert names(found.after_loop) == {"loss"}


def test_what_is_read_on_the_way_out_of_a_loop_around_a_call_is_no_variable_of_a_pass():
    body = "next(source, None)\nif step:\n    best = worst = step\nif best:\n    print(worst)\n    break"
    found = live_in(body, head="for step in (1, 2):", before="best = None")
    assert "best" in names(found.carried)
    assert "worst" not in names(found.carried)
    assert "worst" in names(found.in_some)


WITH = "with look(step):\n    x = make(step)\nuse(x)"


@pytest.mark.parametrize(
    "body",
    [
        WITH,
        "with look(), look() as y:\n    with look():\n        x = make(step)\n    use(x, y)\nuse(x)",
        "with look():\n    if step:\n        continue\n    x = make(step)\nuse(x)",
    ],
)
def test_a_with_statement_is_taken_to_pass_exceptions_on(body):
    """Else all that is assigned under torch.no_grad() would be carried."""
    found = live_in(body)
    assert "x" not in names(found.carried)


def test_variables_of_functions_made_in_the_loop_count_as_read():
    body = "make(lambda x: x + bias)\nbias = 1\nweight = 2\nmake(lambda x: x * weight)"
    found = live_in(body, before="bias = weight = 0")
    assert "bias" in names(found.carried)
    assert "weight" not in names(found.carried)


NEEDED = {
    "scratch = x.mean(); return x - scratch": False,
    "if x: scratch = 1\n    return scratch": True,
    "scratch += x": True,
    "if x: return 0\n    scratch = x\n    return scratch": False,
    "try: scratch = x.mean()\n    except ValueError: pass\n    return scratch": True,
    "for scratch in x: pass\n    return scratch": True,
    "scratch = 1\n    return lambda: scratch": True,
    "scratch = x\n    yield scratch": True,
    "scratch = x\n    del scratch\n    return scratch": False,
}


@pytest.mark.parametrize("body", NEEDED)
def test_a_function_needs_a_global_unless_it_writes_it_first_on_every_way(body):
    """A generator goes on in the middle, and what is made inside may be called in a later pass."""
    space: dict = {}
    exec(f"def f(x):\n    global scratch\n    {body}", space)
    assert ("scratch" in globals_needed(space["f"].__code__)) is NEEDED[body]


def test_globals_that_a_function_of_the_loop_reads_count_where_it_is_named():
    mentions = {"loss_of": ["scale", "shift"]}
    found = live_in("global scale, shift\nscale = step\nloss_of(step)\nshift = step", mentions=mentions)
    assert Variable("recipe", "shift") in found.carried
    assert Variable("recipe", "scale") not in found.carried


@pytest.mark.parametrize(
    ("head", "targets"),
    [
        ("for number, step in enumerate(source):", {"number", "step"}),
        ("for number, (step, unused) in enumerate(zip(source, source)):", {"number", "step"}),
        ("for number, (lr, step) in enumerate(zip(source, source)):", {"number", "step"}),
        ("for step in source:", set()),
    ],
)
def test_targets_of_a_loop_over_tuples_that_its_body_reads_are_named(head, targets):
    body = "print(step, number)" if "number" in head else "print(step)"
    assert names(live_in(body, head=head).targets) == targets


def test_what_a_statement_has_read_before_it_called_for_the_step_is_carried():
    """It lies on the stack of the frame, where nothing looks."""
    text = (
        "def function(source):\n    worst = 0\n    for _ in (1, 2):\n        worst = max(worst, next(source))"
    )
    space = {}
    exec(text, space)

    def source():
        for number in (1, 2):
            frame = sys._getframe(1)
            found.append(live_after(frame.f_code, frame.f_lasti, "recipe", lambda _: ()))
            yield number

    found = []
    space["function"](source())
    assert {"worst", "source"} <= names(found[0].carried)


NAMES = st.sampled_from("abcd")
FLAGS = st.sampled_from(["flags.pop()"])
SIMPLE = st.one_of(
    st.builds("{} = write('{}')".format, NAMES, NAMES).filter(lambda line: line[0] == line[-3]),
    st.builds("read({0}, '{0}')".format, NAMES),
    st.builds("{0} = read({0}, '{0}')".format, NAMES),
)


def indented(lines):
    return textwrap.indent("\n".join(lines), "    ")


def compound(children):
    block = st.lists(children, min_size=1, max_size=3).map(indented)
    return st.one_of(
        st.builds("if {}:\n{}\nelse:\n{}".format, FLAGS, block, block),
        st.builds("while {}:\n{}".format, FLAGS, block),
        st.builds("for x in ['y'] * {}:\n{}".format, FLAGS, block),
        st.builds("if {}:\n    continue\n{}".format, FLAGS, children),
        st.builds("try:\n{}\nfinally:\n{}".format, block, block),
        st.builds("with manager:\n{}".format, block),
        st.builds("with manager, manager:\n    if {}:\n        break\n{}".format, FLAGS, block),
    )


PROGRAMS = st.lists(st.recursive(SIMPLE, compound, max_leaves=6), min_size=1, max_size=4).map("\n".join)


@given(
    begin=st.sampled_from(["a = b = c = d = (None, 0)", "a = c = (None, 0)", "pass"]),
    body=PROGRAMS,
    after=st.lists(SIMPLE, max_size=2).map("\n".join),
    flags=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_no_value_of_a_pass_is_read_in_a_later_one_unless_its_variable_is_carried(begin, body, after, flags):
    """The dumb twin runs the program with values that know in which pass they were written.

    One that the loop alone writes has no value in a process that resumes.
    """
    carried: set[str] = set()
    after_loop: set[str] = set()
    in_some: set[str] = set()
    state = {"pass": 0}
    flags = [*flags]

    class Flags:
        def pop(self):
            return flags.pop() if flags else False

    def write(name):
        return (name, state["pass"])

    def read(value, name):
        if value[1] == state["pass"]:
            pass
        elif name not in begin.split(" = "):
            if value[1] < 3:
                in_some.add(name)
        else:
            (carried if state["pass"] < 4 else after_loop).add(name)
        return (name, state["pass"])

    found = []

    def source():
        for number in range(1, 4):
            state["pass"] = number
            frame = sys._getframe(1)
            found.append(live_after(frame.f_code, frame.f_lasti, "recipe", lambda _: ()))
            yield number
        state["pass"] = 4

    text = f"def program(source, flags, read, write, manager):\n    {begin}\n    for step in source:\n"
    text += textwrap.indent(body, " " * 8) + "\n" + textwrap.indent(after, " " * 4)
    space: dict = {}
    exec(text, space)
    try:
        space["program"](source(), Flags(), read, write, nullcontext())
    except NameError:  # of a variable without a value; a `finally` then reads on the way out
        return
    assert carried <= names(found[0].carried | (found[0].after_loop if "break" in body else set()))
    assert after_loop <= names(found[0].carried | found[0].after_loop)
    assert in_some <= names(found[0].in_some)
