"""A plan is read as it is written, and a line that is wrong is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import UsageError
from elastic.faults.plan import SAVE_POINTS, STEP_POINTS, Deed, Fault, parse


def test_a_plan_of_every_kind_of_line():
    """Comments, blank lines, odd spaces, semicolons; indices count faults, not lines."""
    plan = """
    # a drill
    step 40 rank 1: kill

    step   7 mid-sum:  raise   # with a comment
    step 3 rank 2 optimizer: exit 5; checkpoint 40 before-commit: kill uploader
    """
    assert parse(plan) == (
        Fault(index=0, text="step 40 rank 1: kill", step=40, rank=1, point="forward", deed=Deed.KILL),
        Fault(index=1, text="step 7 mid-sum: raise", step=7, rank=0, point="mid-sum", deed=Deed.RAISE),
        Fault(
            index=2,
            text="step 3 rank 2 optimizer: exit 5",
            step=3,
            rank=2,
            point="optimizer",
            deed=Deed.EXIT,
            code=5,
        ),
        Fault(
            index=3,
            text="checkpoint 40 before-commit: kill uploader",
            step=40,
            rank=None,
            point="before-commit",
            deed=Deed.KILL,
        ),
    )


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing", " ; ;"])
def test_a_plan_may_be_empty(text):
    """A file of comments is a plan without faults."""
    assert parse(text) == ()


@given(
    st.lists(
        st.builds(
            "step {} rank {} {}: {}".format,
            st.integers(0, 10**6),
            st.integers(0, 99),
            st.sampled_from(STEP_POINTS),
            st.sampled_from(["kill", "raise", "exit 7"]),
        )
        | st.builds(
            "checkpoint {} {}: kill uploader".format, st.integers(0, 10**6), st.sampled_from(SAVE_POINTS)
        ),
        max_size=5,
    ),
    st.sampled_from([";", "\n", " ;\n", "  # why\n"]),
)
def test_any_right_plan_gives_its_lines_back(lines, separator):
    """The text of a fault is its line: events quote it."""
    faults = parse(separator.join(lines))
    assert [fault.text for fault in faults] == lines
    assert [fault.index for fault in faults] == list(range(len(lines)))


@pytest.mark.parametrize(
    "line",
    [
        "kill rank 1",
        "step 40",
        "step x: kill",
        "step -1: kill",
        "step 40 rank: kill",
        "step 40 sideways: kill",
        "step 40 upload: kill",
        "step 40: exit",
        "step 40: exit -9",
        "step 40: kill kill",
        "step 40: kill uploader",
        "checkpoint 40: kill uploader",
        "checkpoint 40 forward: kill uploader",
        "checkpoint 40 upload: raise",
        "Step 40: kill",
    ],
)
def test_a_wrong_line_is_named_with_what_was_expected(line):
    """Between two right ones, so that the message must tell which."""
    with pytest.raises(UsageError) as caught:
        parse(f"step 1: kill\n{line}\nstep 2: kill")
    assert repr(line) in str(caught.value)
    assert "kill|raise|exit C" in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_a_plan_or_a_usage_error(text):
    """Never another exception: the plan comes from a command line."""
    try:
        parse(text)
    except UsageError:
        return


def test_a_comment_ends_with_its_line():
    """A semicolon in a comment begins no fault."""
    assert len(parse("step 1: kill  # first this; then that")) == 1
