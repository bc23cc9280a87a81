"""The state that --from names is one that verifies, and the one that the run keeps to."""

import re
import shlex
from dataclasses import replace

import pytest
from committed import begin_run, commit_in, damage
from hypothesis import given
from hypothesis import strategies as st
from records import IDENTITY, PARENT
from torch import nn

from elastic.checkpoint.find_parent import find, parent_of
from elastic.checkpoint.record import parse
from elastic.config.identity import Origin, new_run_from
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.system.clock import SystemClock
from elastic.train.state.state import State

CLOCK = SystemClock()
NEW = RunDir.parse("/runs/new")


@pytest.fixture
def first(tmp_path):
    """A run whose states of the steps 10, 20 and 30 are committed."""
    folder = begin_run(tmp_path / "first", IDENTITY)
    for step in (10, 20, 30):
        commit_in(folder, IDENTITY, step, State(model=nn.Linear(2, 1)))
    return folder


def spoil_record(folder, step):
    """As where a bit flipped in its writer's memory: a restore and `verify` refuse that too."""
    (path,) = folder.glob(f"checkpoints/{step:012d}/*/COMMIT.json")
    path.write_bytes(replace(parse(path.read_bytes()), digest="0" * 64).to_json())


def found_in(text, said):
    return find(Origin.parse(text), CLOCK, said.append).step


@pytest.mark.parametrize("spoil", [damage, spoil_record])
def test_without_a_step_the_newest_state_that_verifies_is_taken(first, spoil):
    """What is passed over is said. One of another run, copied there by hand, is none."""
    said = []
    assert (found_in(str(first), said), said) == (30, [])
    commit_in(first, replace(IDENTITY, seed=99), 40, State(model=nn.Linear(2, 1)))
    spoil(first, 30)
    assert found_in(str(first), said) == 20
    assert said[0].startswith(f"step 40 of {first} is not used: it is of another run")
    assert said[1].startswith(f"step 30 of {first} is not used: ")


@given(
    st.text("ab/:@.0é", min_size=1),
    st.none() | st.integers(0, 10**12 - 1),
    st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,3}", fullmatch=True), max_size=3, unique=True),
)
def test_what_from_names_reads_back_from_its_text(run, step, entries):
    """Also where the run's own name ends like a step or like entries: a slash ends it."""
    named = Origin(run=f"{run}/", step=step, entries=tuple(sorted(entries)))
    assert Origin.parse(str(named)) == named


@pytest.mark.parametrize(
    ("text", "run", "step", "entries"),
    [
        ("s3://bucket/a@40:optimizer,model", "s3://bucket/a", 40, ("model", "optimizer")),
        ("sftp://me@host/a", "sftp://me@host/a", None, ()),
        ("runs/a@latest/", "runs/a@latest/", None, ()),
        ("runs/12:30/@7", "runs/12:30/", 7, ()),
    ],
)
def test_from_reads_its_published_grammar(text, run, step, entries):
    """A slash ends a name that has the signs of a step or of entries."""
    assert Origin.parse(text) == Origin(run=run, step=step, entries=entries)


@pytest.mark.parametrize("text", ["runs/a@x", "runs/a:model,", "@7:model", "runs/a:model@7"])
def test_what_is_no_run_step_or_name_is_refused_with_the_form(text):
    """Each is a slip of the keyboard; no folder of such a name is looked for."""
    with pytest.raises(UsageError) as caught:
        Origin.parse(text)
    form = "expected RUN[@STEP][:NAME,...], such as runs/barlow@200:model,optimizer, found "
    assert str(caught.value).startswith(f"{form}{text!r}; a folder that has @ or :")


@pytest.mark.parametrize(
    ("damaged", "asked", "says"),
    [
        ([20], "first@20", "expected step 20 of .*first that verifies, found damage"),
        ([10, 20, 30], "first", r"found damage \(step 30: .*; step 20: .*; step 10: "),
        ([], "first@15", "expected step 15 of .*first, found the steps 10, 20, 30; --from takes"),
        ([], "none", "expected a run at .*none, found none"),
        ([], "young", "expected a committed state of .*young, found none"),
        ([], "later", r"run\.json.*--from cannot read .*later"),
    ],
)
def test_a_state_that_cannot_be_had_is_refused(damaged, asked, says, first, tmp_path):
    """A state that was named is that one or none: an older one would be another start."""
    begin_run(tmp_path / "young", IDENTITY)
    (tmp_path / "later").mkdir()
    (tmp_path / "later/run.json").write_text('{"format": 9}')  # of a later version, perhaps
    for step in damaged:
        damage(first, step)
    with pytest.raises(UsageError, match=says):
        found_in(f"{tmp_path}/{asked}", [])


def test_a_resume_keeps_the_parent_that_was_recorded(first):
    """The parent trained on, or is gone; the same command, and the one without --from."""
    origin = Origin.parse(f"{first}:model")
    begun = parent_of(None, origin, NEW, CLOCK, print)
    recorded = replace(IDENTITY, parent=begun)
    commit_in(first, IDENTITY, 50, State(model=nn.Linear(2, 1)))
    for named in (origin, None):
        assert parent_of(recorded, named, NEW, CLOCK, print) == begun
    (first / "run.json").unlink()
    assert parent_of(recorded, replace(origin, step=30), NEW, CLOCK, print) == begun


@pytest.mark.parametrize(
    ("parent", "other", "began"),
    [
        (PARENT, "/runs/other", "from step 40 of /runs/first (digest 1212121212121212), entries model"),
        (PARENT, "/runs/first@41:model", "from step 40 of /runs/first"),
        (PARENT, "/runs/first:ema", "from step 40 of /runs/first"),
        (None, "/runs/first", "without --from; found --from"),
    ],
)
def test_a_resume_from_another_state_is_refused(parent, other, began):
    """Another run, another step, other entries than the recorded ones; and none was recorded."""
    with pytest.raises(UsageError, match=re.escape(f"/runs/new holds a run that began {began}")):
        parent_of(replace(IDENTITY, parent=parent), Origin.parse(other), NEW, CLOCK, print)


def test_a_run_does_not_begin_from_itself(tmp_path):
    """The default run directory is the recipe's, which the parent may have used."""
    with pytest.raises(UsageError, match="give --run-dir NEW"):
        parent_of(None, Origin.parse(f"{tmp_path}/x/"), RunDir.parse(f"{tmp_path}/x"), CLOCK, print)


@given(st.text("ab/@: '1", min_size=1, max_size=8).filter(lambda text: text.strip("/")))
def test_the_command_that_a_message_names_begins_from_that_run(address):
    """Also where a folder has blanks, or what stands before a step and before entries of State."""
    command = shlex.split(new_run_from(address))
    assert command[:3] == ["elastic-train", "RECIPE", "--from"]
    origin = Origin.parse(command[3])
    assert (origin.run.rstrip("/"), origin.step, origin.entries) == (address.rstrip("/"), None, ())
