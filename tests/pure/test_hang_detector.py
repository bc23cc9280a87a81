"""Which worker is called hung, and after how long: workers live on a fake clock, and the observer
may be away.
"""

from bisect import bisect_right
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.agent import hang_detector
from elastic.agent.hang_detector import MAX_LIMIT_S, MIN_LIMIT_S, HangDetector, WorkerSample
from elastic.system.silence import Heartbeat, Phase

FOREVER_S = 1e6


def sample_of(phase, step=0, beats=0, is_stopped=False):
    return WorkerSample(Heartbeat(step=step, phase=phase, beats=beats), is_stopped)


class Life:
    """A worker's stretches, one after another; a step is finished when a WAIT ends."""

    def __init__(self, *stretches, begins=Phase.BETWEEN):
        self.changes = [(0.0, sample_of(begins))]
        at, step, before = 0.0, 0, begins
        for beats, (phase, length_s) in enumerate(stretches, start=1):
            step += before is Phase.WAIT
            self.changes.append((at, sample_of(phase, step, beats)))
            at, before = at + length_s, phase
        self.end_s = at

    def sample(self, now_s):
        return self.changes[bisect_right(self.changes, now_s, key=lambda change: change[0]) - 1][1]


def steps(count, *, step_s=0.5, wait_s=0.1, between_s=0.1):
    return [(Phase.STEP, step_s), (Phase.WAIT, wait_s), (Phase.BETWEEN, between_s)] * count


def watch(lives, *, until_s, every_s=0.25, fixed_limit_s=None, detector=None):
    """Observe at fixed intervals.

    Returns the first hung worker and when it was found, or None and the last detector.
    """
    detector = detector or HangDetector(fixed_limit_s=fixed_limit_s)
    for tick in range(1, int(until_s / every_s) + 1):
        now_s = tick * every_s
        detector.observe({rank: life.sample(now_s) for rank, life in lives.items()}, now_s=now_s)
        if detector.hung is not None:
            return detector.hung, now_s
    return None, detector


@pytest.mark.parametrize(("step_s", "limit_s"), [(120.0, 1200.0), (300.0, MAX_LIMIT_S), (0.25, MIN_LIMIT_S)])
def test_first_steps_are_not_judged_by_the_generation_before(step_s, limit_s):
    """Learned: steps of half a second. The first steps of the new generation may take minutes, as
    when kernels are compiled; the fourth hangs, and is judged by them, within bounds.
    """
    _, learned = watch({0: Life(*steps(50))}, until_s=30)
    longest_s = learned.longest_step_s
    learned.workers.clear()
    life = Life(*steps(hang_detector.MIN_TIMED_STEPS, step_s=step_s), (Phase.STEP, FOREVER_S))
    hung, when_s = watch({0: life}, until_s=5000, detector=learned)
    assert hung.place == "step"
    assert limit_s <= hung.limit_s <= min(limit_s + 10.0, MAX_LIMIT_S)
    assert 0 <= when_s - life.changes[-1][0] - hung.limit_s <= 1.0
    assert learned.longest_step_s >= longest_s > 0  # what the last generation taught is kept


def test_a_slow_worker_is_not_judged_by_a_fast_one():
    """Steps take rank 0 a minute and rank 1 a second: three steps of rank 1 are known before the
    first of rank 0 ends.
    """
    slow = Life(*steps(5, step_s=60.0, wait_s=0.1))
    fast = Life(*steps(5, step_s=1.0, wait_s=59.1))
    assert watch({0: slow, 1: fast}, until_s=299.0)[0] is None


def test_steps_too_short_to_be_sampled_are_learned_from():
    """Each step's own part lasts a millisecond, so no sample shows it.

    A hang is then found at the lower limit, not after 1800 s.
    """
    life = Life(*steps(20, step_s=0.001, wait_s=0.001, between_s=7.0), (Phase.STEP, FOREVER_S))
    hung, when_s = watch({0: life}, until_s=1000, every_s=0.25)
    assert hung.place == "step"
    assert when_s - life.changes[-1][0] < MIN_LIMIT_S + 1.0


stretches = st.one_of(
    st.tuples(st.just(Phase.STEP), st.floats(0.001, MIN_LIMIT_S)),
    st.tuples(st.sampled_from([Phase.START, Phase.BETWEEN, Phase.SAVE]), st.floats(0.001, MAX_LIMIT_S)),
    st.tuples(st.just(Phase.WAIT), st.floats(0.001, 2 * MAX_LIMIT_S)),
    st.tuples(st.just(Phase.AFTER), st.floats(0.001, 10 * MAX_LIMIT_S)),
)
stories = st.lists(stretches, min_size=1, max_size=12)
gaps = st.one_of(st.floats(0.01, 2.0), st.floats(2.0, 3000.0))


@given(st.lists(stories, min_size=1, max_size=3), st.lists(gaps, max_size=60))
def test_no_worker_is_blamed_within_the_limits_of_its_phases(workers, observations):
    """Any order of phases and any gaps between observations, long ones too: the counted silence
    never exceeds the true one.
    """
    lives = {rank: Life(*stretches) for rank, stretches in enumerate(workers)}
    detector, now_s = HangDetector(fixed_limit_s=None), 0.0
    for gap_s in observations:
        now_s += gap_s
        alive = {rank: life.sample(now_s) for rank, life in lives.items() if now_s < life.end_s}
        detector.observe(alive, now_s=now_s)
        assert detector.hung is None


def dumb_silence_s(history, limit_s):
    """Over the whole history of (now, sample): from the last observation backwards, as long as
    nothing changed.
    """
    total_s = 0.0
    for (earlier_s, earlier), (later_s, later) in reversed(list(pairwise(history))):
        if earlier != later:
            break
        total_s += min(later_s - earlier_s, limit_s / 4)
    return total_s


eighths = st.integers(1, 32).map(lambda number: number / 8)  # sums of these are exact in any order
samples = st.builds(
    sample_of,
    step=st.integers(0, 1),
    phase=st.sampled_from([Phase.STEP, Phase.WAIT, Phase.BETWEEN, Phase.SAVE]),
    beats=st.integers(0, 1),
    is_stopped=st.booleans(),
)
looks = st.tuples(eighths, st.integers(1, 8), st.dictionaries(st.integers(0, 2), samples, min_size=3))


@given(st.lists(looks, max_size=12))
@example([(1.0, 8, dict.fromkeys(range(3), sample_of(Phase.WAIT)))])
def test_with_a_fixed_limit_the_dumb_twin_blames_the_same_worker(story):
    """The twin keeps every sample and counts backwards.

    It blames stopped workers, then working ones, then waiting ones, the longest over its limit
    first.
    """
    detector, now_s, history = HangDetector(fixed_limit_s=5.0), 0.0, []
    for gap_s, times, seen in story:
        for _ in range(times):
            now_s += gap_s
            detector.observe(seen, now_s=now_s)
            history.append((now_s, seen))
            over = []
            for rank, sample in seen.items():
                phase = Phase.STEP if sample.is_stopped else sample.heartbeat.phase
                limit_s = {Phase.WAIT: 10.0, Phase.SAVE: 1800.0}.get(phase, 5.0)
                silence_s = dumb_silence_s([(at, samples[rank]) for at, samples in history], limit_s)
                if silence_s > limit_s:
                    kind = 0 if sample.is_stopped else 2 if phase is Phase.WAIT else 1
                    over.append((kind, -silence_s / limit_s, rank))
            hung = detector.hung
            assert (None if hung is None else hung.rank) == (min(over)[2] if over else None)
