"""Two runs are the same as far as they agree; else the first step that differs is named."""

import json
import re
from dataclasses import replace

import pytest
from drawn_runs import write
from hostile import json_values
from hypothesis import given
from hypothesis import strategies as st
from logged import logged
from records import IDENTITY

from elastic.observe.step_columns import StepBatch
from elastic.observe.step_line import StepLine
from elastic.report.diff import ComparedRun, StepChains, compare


def chains_of(lines):
    found = StepChains()
    found.add(StepBatch(lines=[*lines]))
    return found


def run(chains, *, finished=True, digest="d", saved=None):
    found = chains_of(
        StepLine(step=step, chain=chain and chain * 16) for step, chain in enumerate(chains, start=1)
    )
    found.digests = saved or {}
    end = digest if finished else None
    return ComparedRun(finished=finished, steps=len(chains), final_digest=end), found


own_chains = st.text("0123456789abcdef", min_size=16, max_size=16)
lines = st.lists(st.builds(StepLine, step=st.integers(1, 9), chain=own_chains | json_values), max_size=12)


def is_chain(value):
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


@given(lines, lines, st.sets(st.integers(0, 11)))
def test_runs_compare_as_their_lines_do(a, b, taken):
    """Steps that come twice, or back, or without a value; values that no run writes."""
    b = [a[place] if place in taken and place < len(a) else line for place, line in enumerate(b)]
    of_a, of_b = ({line.step: line.chain for line in of if is_chain(line.chain)} for of in (a, b))
    common = sorted(of_a.keys() & of_b.keys())
    at_once = chains_of(a)
    ends = ComparedRun(finished=False, steps=0, final_digest=None)
    found = compare(ends, at_once, ends, chains_of(b))
    assert found.common_steps == len(common)
    assert found.first_difference == next((step for step in common if of_a[step] != of_b[step]), None)
    assert at_once.last_step == (a[-1].step if a else 0)


def test_values_that_no_run_writes_are_not_compared_and_counted():
    """`int` and `bytes.fromhex` would take some of them for a value; half of a pair is no UTF-8."""
    others = ["00000000000000AB", "0x000000000000ab", "\u0660" * 14 + "ab", 7, ["a"], "\ud800", ""]
    found = chains_of(StepLine(step=step, chain=each) for step, each in enumerate(others, start=1))
    assert (len(found.by_step), found.num_unreadable, found.last_step) == (0, len(others), len(others))


def begun(folder, chains, identity=IDENTITY, *events):
    lines = [StepLine(step=step, chain=each * 16) for step, each in enumerate(chains, start=1)]
    (write(folder, events, lines) / "run.json").write_bytes(identity.to_json())
    return str(folder)


def test_unreadable_lines_are_counted_and_hide_no_comparison(tmp_path, printed):
    """Two of 77 lines are damaged in the middle of the file. A last line without its end is that of
    a run that goes on, or was killed.
    """
    finished = logged("run_finished", 9.0, steps=77, epochs=1, digest="d")
    a, b = (begun(tmp_path / name, "a" * 77, IDENTITY, finished) for name in "ab")
    metrics = tmp_path / "b/metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines, '{"step": 78, "ch']))
    assert "the same at all 77 steps, and the same final digest\n" in printed(0, "diff", a, b)
    lines[20], lines[40] = lines[20].replace("step", "st\0"), lines[40][:-3]
    metrics.write_text("\n".join([*lines, ""]))
    found = json.loads(printed(0, "diff", a, b, "--json"))
    assert found["reason"] == (
        "the same at 75 of 77 steps, and the same final digest;"
        " 2 lines in the metrics of B cannot be read: not compared"
    )
    assert (found["a"]["unreadable_lines"], found["b"]["unreadable_lines"]) == (0, 2)
    assert "2 lines cannot be read; those steps are in no figure" in printed(0, "report", b)
    lines[30] = lines[30].replace("a" * 16, "b" * 16)
    metrics.write_text("\n".join([*lines, ""]))
    assert "is 31; 2 lines in the metrics of B cannot be read" in printed(1, "diff", a, b)


@pytest.mark.parametrize(
    ("a", "b", "same", "says"),
    [
        (run("abc"), run("abc"), True, "the same at all 3 steps, and the same final digest"),
        (run("abcd"), run("abed"), False, "differ is 3"),
        (run("ab", finished=False), run("abcd"), True, "A is not finished"),
        (run("abcd"), run("ab"), False, "B ends at step 2"),
        (run("abcd", finished=False), run("ab"), False, "B ends at step 2"),
        # A buffer that no loss depends on is different.
        (run("ab", digest="x"), run("ab", digest="y"), False, "after step 2 differ: digests x and y"),
        (run("ab", saved={2: "x"}), run("abc", finished=False, saved={2: "y"}), False, "after step 2 differ"),
        # Empty metrics, or lines without a chain, must not pass for agreement.
        (run(""), run(""), False, "no step in common"),
        (run([None, None]), run([None, None]), False, "no step in common"),
    ],
)
def test_runs_are_the_same_as_far_as_both_have_recorded(a, b, same, says):
    found = compare(*a, *b)
    assert found.same is same
    assert says in found.reason


def test_runs_that_differ_say_what_they_were_begun_with(tmp_path, printed):
    """Another argument and an edited recipe, in one line and in the JSON; nothing is said of runs
    that are the same, and a run whose run.json is damaged is compared all the same.
    """
    other = replace(IDENTITY, arguments=("--epochs", "4"), recipe_sha256="cd" * 32)
    a, b, c = (
        begun(tmp_path / name, chains, begun_with)
        for name, chains, begun_with in (("a", "ab", IDENTITY), ("b", "ac", other), ("c", "ab", other))
    )
    (said,) = [line for line in printed(1, "diff", a, b).splitlines() if "other settings" in line]
    assert "recipe arguments: --epochs 3 in A, --epochs 4 in B; recipe's text: sha256 " in said
    (tmp_path / "b" / "run.json").write_text("{}")
    assert "other settings" not in printed(1, "diff", a, b) + printed(0, "diff", a, c)
