"""A fault schedule follows from its seed and has its rate; the goodput is that of the formula."""

import random
from collections import Counter

import pytest
from fault_schedule import MIX, FaultKind, best_interval_s, expected_goodput, fault_schedule
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 2**32), st.floats(0.5, 60), st.floats(0, 600))
def test_a_fault_schedule_is_a_function_of_its_seed(seed, mtbf_s, duration_s):
    """Drawn twice, and once for half the time: the shorter one is the start of the longer one."""
    faults = fault_schedule(seed, mtbf_s=mtbf_s, duration_s=duration_s)
    assert faults == fault_schedule(seed, mtbf_s=mtbf_s, duration_s=duration_s)
    half = fault_schedule(seed, mtbf_s=mtbf_s, duration_s=duration_s / 2)
    assert faults[: len(half)] == half
    assert [s.at_s for s in faults] == sorted(s.at_s for s in faults)
    assert all(0 < s.at_s < duration_s and 0 <= s.victim < 1 for s in faults)


def test_a_long_fault_schedule_has_the_requested_rate_and_mix():
    """Forty thousand faults: each share is within half a percentage point, the rate within 3 %."""
    faults = fault_schedule(1, mtbf_s=2.0, duration_s=80_000.0)
    assert len(faults) == pytest.approx(40_000, rel=0.03)
    counted = Counter(fault.kind for fault in faults)
    assert set(counted) == set(FaultKind)
    for kind, percent in MIX.items():
        assert counted[kind] / len(faults) == pytest.approx(percent / sum(MIX.values()), abs=0.005)


@pytest.mark.parametrize(
    "mix", [{}, {FaultKind.WORKER_KILLED: 0}, {FaultKind.WORKER_KILLED: 2, FaultKind.WORKER_SLOW: -1}]
)
def test_an_empty_or_negative_mix_of_faults_is_refused(mix):
    with pytest.raises(ValueError, match="mix"):
        fault_schedule(1, mtbf_s=1.0, duration_s=1.0, mix=mix)


def simulated(mtbf_s, recovery_s, interval_s, save_s, wall_s):
    """The goodput by simulation: a clock that advances from save to save, and fault to fault."""
    draw = random.Random(3)
    now = useful = 0.0
    until_fault = draw.expovariate(1 / mtbf_s)
    while now < wall_s:
        if until_fault >= interval_s + save_s:
            now, useful, until_fault = (
                now + interval_s + save_s,
                useful + interval_s,
                until_fault - interval_s - save_s,
            )
        else:
            now += until_fault + recovery_s
            until_fault = draw.expovariate(1 / mtbf_s)
    return useful / now


@pytest.mark.parametrize(
    ("mtbf_s", "recovery_s", "interval_s", "save_s"),
    [(60.0, 2.0, 1.0, 0.05), (600.0, 30.0, 20.0, 1.0), (30.0, 0.5, 0.1, 0.0)],
)
def test_the_formula_agrees_with_a_simulation_if_faults_are_rare(mtbf_s, recovery_s, interval_s, save_s):
    """The formula is of first order: ten saves between two faults suffice for an error of 1 %."""
    expected = expected_goodput(mtbf_s=mtbf_s, recovery_s=recovery_s, interval_s=interval_s, save_s=save_s)
    assert expected == pytest.approx(simulated(mtbf_s, recovery_s, interval_s, save_s, 2e5), abs=0.01)


def test_the_formula_gives_the_published_figures():
    """M = 60 s, w = 50 ms, at the best interval: 0.93 for u0 = 2 s, 0.80 for 10 s; and never below
    0.
    """
    best = best_interval_s(mtbf_s=60.0, save_s=0.05)
    found = [expected_goodput(mtbf_s=60.0, recovery_s=u0, interval_s=best, save_s=0.05) for u0 in (2, 10, 60)]
    assert found == [pytest.approx(0.93, abs=0.01), pytest.approx(0.80, abs=0.01), 0.0]
