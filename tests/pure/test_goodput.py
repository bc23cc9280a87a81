"""Each second of a run went into a step that counts, or to something that has a name."""

import pytest
from logged import logged, started, step

from elastic.observe import goodput
from elastic.observe.generations import generations
from elastic.observe.step_columns import columns_of

CAUSES = ("failure", "node lost", "node joined", "node left", "resume")


def time_spent(events, lines, now_s=None):
    return goodput.time_spent(generations(events, columns_of(lines), now_s))


SIGN = logged("fault_injected", 109.0, 3, fault="kill", step=0)
FAILED = [started(110.5, 2, "failure"), logged("fault_injected", 120.0, 2, fault="kill", step=8)]
UNTRAINED = [started(103.0, 2, "failure"), started(105.0, 3, "node lost"), SIGN]
LEFT = [logged("run_interrupted", 100.0 + at, 1, f"n{at - 2}", step=2) for at in (3, 4)]
LOST = logged("generation_ended", 103.0, 1, "n2", cause="the generation ended: node lost", step=2)
GAVE_UP = logged("run_interrupted", 120.0, 1, "n2", step=2, gave_up=True)
AGAIN = started(1000.0, 2, "resume")
LOSSES = logged("restored", 1001.0, 2, step=2, lost_steps=38, last_step_s=140.0)

TWO = [step(1, 101.0, 1), step(2, 102.0, 1)]
THREE, LATE = [*TWO, step(3, 1002.0, 2)], [*TWO, step(3, 1004.0, 2)]
EIGHT = [*(step(n, 102.0 + n, 1) for n in range(1, 7)), step(7, 113.0, 2), step(8, 114.5, 2)]


@pytest.mark.parametrize(
    ("later", "lines", "now_s", "useful_paused_s", "badput_s"),
    [
        # Six of eight steps count when generation 2 goes on; its first step begins at 112.0.
        (FAILED, EIGHT, None, (8, 0), {"start": 2, "failure": 4, "between steps": 0.5, "end": 5.5}),
        # A generation without a step is a part of a recovery, the last one of the way to itself.
        (UNTRAINED, [], None, (0, 0), {"failure": 3, "node lost": 6}),
        # A planned stop takes no time: the same command is given again at 1000, or not yet.
        ([*LEFT, AGAIN], THREE, None, (3, 896), {"resume": 3}),
        (LEFT, TWO, 1000.0, (2, 896), {"end": 2}),
        # A wait for a lost node is lost to that, also where it is in vain.
        ([LOST], TWO, 120.0, (2, 0), {"node lost": 18}),
        ([LOST, GAVE_UP, AGAIN], THREE, None, (3, 0), {"node lost": 18, "down": 880, "resume": 1}),
        # All nodes die in step 41, and no event tells; the newest checkpoint is that of step 2.
        ([AGAIN, LOSSES], LATE, None, (3, 0), {"down": 860, "resume": 38 + 3}),
    ],
)
def test_time_goes_to_what_took_it(later, lines, now_s, useful_paused_s, badput_s):
    found = time_spent([started(100.0, 1, "start"), *later], lines, now_s)
    assert ((found.useful_s, found.paused_s), found.badput_s) == (useful_paused_s, badput_s)
    whole_s = useful_paused_s[0] + sum(badput_s.values())
    assert found.goodput == pytest.approx(useful_paused_s[0] / whole_s)
