"""Steps that are done again are compared with what they gave before, and with nothing else."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import ALONE, groups_of

from elastic.data.record import DataRecord
from elastic.divergence import Divergence
from elastic.errors import ReplayDiffers
from elastic.events import ReplayDiffered
from elastic.observe.log import EventLog, read_events
from elastic.observe.metrics import Rewound
from elastic.observe.step_line import StepLine
from elastic.proof.replay import FirstTime, Replay, ReplayCheck, begin_replay, first_times
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock
from elastic.train.state.restore import ResumePoint


def line_of(step, generation, loss=0.5):
    return StepLine(step=step, generation=generation, chain=f"{step:016x}", loss=loss)


def times(last, dropped, restored=8, chain=f"{8:016x}", known=None, ended=0):
    found = first_times(last, dropped, restored=restored, chain=chain, known=known, ended=ended)
    return [(each.step, each.generation) for each in found]


@st.composite
def histories(draw):
    """Generations in a row: (restored, last step, agreed or None, ended). A generation whose ranks
    differed is followed by one that begins from a state that they agreed on.
    """
    found, written, limit = [], 0, 0
    for _ in range(draw(st.integers(1, 5))):
        restored = draw(st.integers(0, min(written, limit)))
        last = restored + draw(st.integers(0, 6))
        agreed = draw(st.none() | st.integers(restored, last))
        ended = agreed is None and draw(st.booleans())
        found.append((restored, last, agreed, ended))
        written, limit = last, last if agreed is None else agreed
    return found, draw(st.integers(0, min(written, limit)))


@given(histories(), st.booleans())
def test_only_steps_of_ranks_that_agreed_are_compared(history, is_settled):
    """The twin marks each line when it is written. The difference between ranks that is known is
    the newest; one that was settled by a generation after it is not known any more.
    """
    generations, restored = history
    lines, sound, ended_last, known = {}, {}, 0, None
    for number, (began, last, agreed, ended) in enumerate(generations, start=1):
        if is_settled:
            known = None
        for step in [each for each in lines if each > began]:
            del lines[step]
        for step in range(began + 1, last + 1):
            lines[step] = line_of(step, number)
            sound[step] = agreed is None or step <= agreed
        if agreed is not None:
            known = Divergence(generation=number, step=last, agreed=agreed, entry="w")
        ended_last = number if ended else ended_last
    kept = max((step for step in lines if step <= restored), default=None)
    dropped = [lines[step] for step in sorted(lines) if step > restored]

    found = times(
        lines.get(kept),
        dropped,
        restored=restored,
        chain=f"{restored:016x}{'0' * 48}",
        known=known,
        ended=ended_last,
    )

    expected = [(s, lines[s].generation) for s in sorted(lines) if s > restored and sound[s]]
    assert found == [(step, number) for step, number in expected if number > ended_last]


def test_lines_from_another_state_say_nothing_of_its_steps():
    """The line of the restored step is missing, for want of room on a disk; or it is that of
    another history, such as an edited recipe's.
    """
    dropped = [line_of(9, 1), line_of(10, 1)]

    assert times(line_of(8, 1), dropped) == [(9, 1), (10, 1)]
    assert times(line_of(7, 1), dropped) == []
    assert times(None, dropped) == []
    assert times(line_of(8, 1), dropped, chain=f"{7:016x}") == []
    assert times(None, dropped, restored=0, chain="") == [(9, 1), (10, 1)]


def replays(member, folder, excuse, is_deterministic, chains):
    """What a rank does that comes out with these chain values from step 9 on; all ranks know from
    rank 0 alone what steps 9 to 11 gave.
    """
    groups = groups_of(member)
    is_first = member.rank == 0
    told = [FirstTime(step=s, chain=f"chain {s}", loss=s / 10, generation=1) for s in (9, 10, 11)]
    begun = groups.from_rank0(Replay(restored=8, steps=told if is_first else [], excuse=excuse))
    log = EventLog(Path(folder, "events.jsonl"), node="n", clock=SystemClock()) if is_first else None
    check = ReplayCheck(begun, "runs/x", log)
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        for step, chain in enumerate(chains, start=9):
            check.check(StepLine(step=step, loss=0.25, chain=chain), groups)
    except ReplayDiffers as error:
        return [step, str(error)]
    finally:
        torch.use_deterministic_algorithms(False)
    return [None, ""]


OTHER = ["chain 9", "another", "another", "another"]


def test_what_a_user_knows_is_said_once(ranks, tmp_path, capsys):
    """The recipe was edited, or it switched off the check for algorithms without determinism, which
    rank 0 decides for all. Chain values stay different, and no later step is said.
    """
    assert ranks.run(2, replays, str(tmp_path), "the recipe was edited", True, OTHER) == 2 * [[None, ""]]
    assert replays(ALONE, str(tmp_path), "", False, OTHER) == [None, ""]

    excuses = [each.event.excuse for each in read_events(tmp_path)]
    assert excuses[0] == "the recipe was edited"
    assert "not deterministic" in excuses[1]
    assert len(excuses) == 2
    assert capsys.readouterr().out.count("step 10 was done again") == 1
    found = ranks.run(2, replays, str(tmp_path), "", True, OTHER)  # where no one knows, each rank ends
    assert found == [found[0]] * 2 and found[0][0] == 10 and "loss 1.0 then, 0.25 now" in found[0][1]


def begun(folder, there, trace=None):
    now = DataRecord(samples=9, epochs=2, steps=18, tail="drop", recipe="aa")
    run_dir, groups = SimpleNamespace(events=folder), groups_of(ALONE)
    parts = SimpleNamespace(output=True, trace=trace, groups=groups, run_dir=run_dir)
    point = ResumePoint(step=8, chain=f"{8:016x}", source="snapshot")
    rewound = Rewound(highest=9, last=line_of(8, 1), dropped=(line_of(9, 1),))
    replay = begin_replay(parts, point, rewound, replace(now, **there), now)
    return [each.step for each in replay.steps], replay.excuse


def test_what_excuses_a_difference_and_what_is_not_compared(tmp_path):
    """Earlier code left no hash of the recipe; another length was said; a check compares more than
    chain values.
    """
    assert begun(tmp_path, {}) == ([9], "")
    assert begun(tmp_path, {"recipe": "bb"}) == ([9], "the recipe was edited in between")
    assert begun(tmp_path, {}, trace="of a check")[0] == []
    for other in ({"recipe": ""}, {"steps": 17}, {"epochs": 3}, {"order": "cc"}, {"samples": 8}):
        assert begun(tmp_path, other)[0] == []
    EventLog(tmp_path / "e.jsonl", node="n", clock=FakeClock()).record(
        ReplayDiffered(step=9, excuse="an edit")
    )
    assert begun(tmp_path, {})[0] == [9]
    ended = EventLog(tmp_path / "f.jsonl", node="n", clock=FakeClock())
    ended.generation = 1
    ended.record(ReplayDiffered(step=9))
    assert begun(tmp_path, {})[0] == []
