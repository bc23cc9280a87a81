"""A fault that struck nothing is named at the end of the run."""

import pytest

from elastic.faults.grammar import parse
from elastic.faults.unreached import told_at_the_end

REASONS = {
    "step 5 rank 1 backward: kill": "a step whose gradients are made by hand has none",
    "step 5 rank 1 snapshot: kill": "--snapshot-every 1 takes one after each",
    "step 5 rank 1: raise": "no such rank trained that step",
    "step 9: kill": "the run ended after step 8",
    "step 9 node 0: kill": "the run ended after step 8",
    "step 8 node 1: kill": "no such node finished that step",
    "checkpoint 7 upload: kill uploader": "that step was not saved",
    "checkpoint 9 upload: kill uploader": "the run ended after step 8",
    "generation 2 rank 0 restore: kill": "that generation did not come",
    "generation 2 node 0 rendezvous: kill": "that generation did not come",
    "every 20s: kill random worker, seed 7": "the run ended before its first time",
}


@pytest.mark.parametrize("line", REASONS)
def test_a_fault_that_struck_nothing_is_told_with_its_line_and_why(line):
    (said,) = told_at_the_end(parse(line), 8)
    assert said.startswith(f"no fault struck: {line} (")
    assert REASONS[line] in said


def test_of_many_faults_the_first_are_told_and_the_others_counted():
    lines = told_at_the_end(parse("\n".join(f"step {9 + n}: kill" for n in range(9))), 8)
    assert len(lines) == 7
    assert lines[-1] == "no fault struck of 3 more lines of the plan"
    assert told_at_the_end((), 8) == []
