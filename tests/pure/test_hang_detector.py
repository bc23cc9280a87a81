"""Who is called hung, after how long: lives of workers on a fake clock, looked at by an observer who may be away."""

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.hangs.hang_detector import ENOUGH, LONGEST_S, SHORTEST_S, TIMES, HangDetector, WorkerSample
from elastic.system.phase import Phase
from elastic.worker.heartbeat import WARMUP_STEPS, HeartbeatSender

FOREVER_S = 1e6


class Life:
    """A worker's stretches, one after another, in the real places; a step is finished at the end of each SAVE or BETWEEN that follows a WAIT."""

    def __init__(self, *stretches, begins=Phase.BETWEEN):
        self.changes = [(0.0, WorkerSample(step=0, place=begins, beats=0, is_stopped=False))]
        at, step, before = 0.0, 0, begins
        for beats, (place, length_s) in enumerate(stretches, start=1):
            step += before is Phase.WAIT
            self.changes.append((at, WorkerSample(step=step, place=place, beats=beats, is_stopped=False)))
            at, before = at + length_s, place
        self.end_s = at

    def sight(self, now_s):
        return self.changes[bisect_right(self.changes, now_s, key=lambda change: change[0]) - 1][1]


def steps(count, *, step_s=0.5, wait_s=0.1, between_s=0.1):
    return [(Phase.STEP, step_s), (Phase.WAIT, wait_s), (Phase.BETWEEN, between_s)] * count


def watch(lives, *, until_s, every_s=0.25, fixed_s=None, silences=None):
    """Look all the time; the first who is blamed, and when, or None and the last view."""
    silences = silences or HangDetector(fixed_s=fixed_s)
    for tick in range(1, int(until_s / every_s) + 1):
        now_s = tick * every_s
        silences = silences.look({rank: life.sight(now_s) for rank, life in lives.items()}, now_s=now_s)
        if silences.hung is not None:
            return silences.hung, now_s
    return None, silences


def test_a_step_that_hangs_is_blamed_by_what_earlier_steps_took():
    """Steps of 3 s, then one that never ends: ten times three, not more than a few looks later; who waits for it is left alone."""
    life = Life(*steps(5, step_s=3.0), (Phase.STEP, FOREVER_S))
    peer = Life(*steps(5, step_s=2.9, wait_s=0.2), (Phase.STEP, 2.9), (Phase.WAIT, FOREVER_S))
    began_s = life.changes[-1][0]
    hung, when_s = watch({0: peer, 1: life}, until_s=5000, every_s=0.5)
    assert (hung.rank, hung.place) == (1, Phase.STEP)
    assert 30.0 <= hung.limit_s <= 40.0
    assert hung.limit_s < when_s - began_s < hung.limit_s + 2.0
    assert "rank 1 hangs: no progress for" in hung.reason
    assert "--hang-timeout" in hung.reason


@pytest.mark.parametrize("place", [Phase.BETWEEN, Phase.SAVE, Phase.WAIT, Phase.START])
def test_an_evaluation_or_a_save_that_is_far_longer_than_any_step_is_not_a_hang(place):
    """A thousand steps of a second teach a limit of ten; then the first evaluation takes 25 minutes, and the others wait for it."""
    life = Life(*steps(1000), (place, 1500.0), *steps(2))
    hung, seen = watch({0: life}, until_s=life.end_s, every_s=0.5)
    assert hung is None
    assert seen.longest_step_s < 2.0


def test_after_the_last_step_a_recipe_may_take_as_long_as_it_likes():
    """The last step is saved; the recipe then trains a probe for a week."""
    assert watch({0: Life(*steps(5), (Phase.AFTER, FOREVER_S))}, until_s=600_000, every_s=60.0)[0] is None


def test_all_who_wait_for_nobody_are_blamed_at_last_but_not_while_a_culprit_may_still_be_found():
    """All workers of this node wait, as when a network swallows messages: twice what a peer may take."""
    lives = {rank: Life(*steps(5), (Phase.WAIT, FOREVER_S)) for rank in range(2)}
    hung, when_s = watch(lives, until_s=5000, every_s=1.0, fixed_s=60.0)
    assert (hung.rank, hung.place, hung.limit_s) == (0, Phase.WAIT, 120.0)
    assert when_s > 120.0


def test_a_stopped_process_is_blamed_wherever_it_stands_and_before_those_who_are_silent_for_longer():
    """Rank 1 is stopped while it waits; rank 0 has been evaluating for much longer."""
    evaluating = WorkerSample(step=9, place=Phase.BETWEEN, beats=7, is_stopped=False)
    waiting = WorkerSample(step=9, place=Phase.WAIT, beats=7, is_stopped=False)
    silences = HangDetector(fixed_s=None)
    for now_s in range(1200):
        stopped = replace(waiting, is_stopped=now_s >= 1100)
        silences = silences.look({0: evaluating, 1: stopped}, now_s=float(now_s))
        assert silences.hung is None or now_s > 1100 + SHORTEST_S
    assert silences.hung.rank == 1
    assert "stopped" in silences.hung.reason


def test_a_process_that_was_continued_begins_anew():
    """Stopped for 9 s of the 10 it may be, again and again."""
    silences, sight = (
        HangDetector(fixed_s=None),
        WorkerSample(step=0, place=Phase.START, beats=0, is_stopped=False),
    )
    for now_s in range(100):
        silences = silences.look({0: replace(sight, is_stopped=now_s % 10 != 0)}, now_s=float(now_s))
        assert silences.hung is None


def test_the_first_stretches_of_a_generation_are_not_judged_by_what_the_last_one_taught():
    """Learned: steps of half a second. The new generation's first stretches take two minutes each, as when kernels are built; the fourth is judged by them."""
    _, learned = watch({0: Life(*steps(50))}, until_s=30)
    slow = Life(*steps(ENOUGH, step_s=120.0), (Phase.STEP, FOREVER_S))
    hung, _ = watch({0: slow}, until_s=5000, silences=learned.anew())
    assert hung.place is Phase.STEP
    assert 1200.0 <= hung.limit_s <= LONGEST_S
    # And what the last one taught is kept: nobody measured the fast steps again.
    assert learned.anew().longest_step_s == learned.longest_step_s > 0


def test_a_slow_worker_is_not_judged_by_a_fast_one():
    """Rank 0 has steps of a minute, rank 1 of a second and waits: three of rank 1 are known before the first of rank 0 ends."""
    slow = Life(*steps(5, step_s=60.0, wait_s=0.1))
    fast = Life(*steps(5, step_s=1.0, wait_s=59.1))
    assert watch({0: slow, 1: fast}, until_s=299.0)[0] is None


def test_a_step_too_short_to_be_seen_is_known_all_the_same():
    """Each step's own part lasts a millisecond of the ten seconds between two looks' worth of evaluation; hanging is then found at the lower limit."""
    life = Life(*steps(20, step_s=0.001, wait_s=0.001, between_s=7.0), (Phase.STEP, FOREVER_S))
    hung, when_s = watch({0: life}, until_s=1000, every_s=0.25)
    assert hung.place is Phase.STEP
    assert when_s - life.changes[-1][0] < SHORTEST_S + 1.0


stretches = st.one_of(
    st.tuples(st.just(Phase.STEP), st.floats(0.001, SHORTEST_S)),
    st.tuples(st.sampled_from([Phase.START, Phase.BETWEEN, Phase.SAVE]), st.floats(0.001, LONGEST_S)),
    st.tuples(st.just(Phase.WAIT), st.floats(0.001, 2 * LONGEST_S)),
    st.tuples(st.just(Phase.AFTER), st.floats(0.001, 10 * LONGEST_S)),
)
gaps = st.one_of(st.floats(0.01, 2.0), st.floats(2.0, 3000.0))


@given(
    st.lists(st.lists(stretches, min_size=1, max_size=12), min_size=1, max_size=3),
    st.lists(gaps, max_size=60),
)
def test_nobody_is_blamed_within_the_limits_of_his_place_however_the_observer_looks(workers, looks):
    """Any order of places and any gaps between looks, among them long ones: what is counted is never more than the true silence."""
    lives = {rank: Life(*stretches) for rank, stretches in enumerate(workers)}
    silences, now_s = HangDetector(fixed_s=None), 0.0
    for gap_s in looks:
        now_s += gap_s
        alive = {rank: life.sight(now_s) for rank, life in lives.items() if now_s < life.end_s}
        silences = silences.look(alive, now_s=now_s)
        assert silences.hung is None


@given(st.floats(1.0, 3600.0), st.floats(0.05, 10.0), st.integers(1, 3), st.floats(0.0, 1e5))
def test_an_observer_who_was_away_looks_four_times_before_it_blames(fixed_s, every_s, before, away_s):
    """The agent was stopped with its workers, or the machine slept: the first looks afterwards may not blame, however long it was."""
    sight = WorkerSample(step=3, place=Phase.STEP, beats=40, is_stopped=False)
    silences, now_s = HangDetector(fixed_s=fixed_s), 100.0
    for _ in range(before):
        silences, now_s = silences.look({0: sight}, now_s=now_s), now_s + min(every_s, fixed_s / 100)
    now_s += away_s
    for look in range(1, 4):
        silences, now_s = silences.look({0: sight}, now_s=now_s), now_s + away_s
        assert silences.hung is None, look


def dumb_silence_s(history, limit_s):
    """Over the whole history of (now, sight): from the last look backwards, as long as nothing changed."""
    total_s = 0.0
    for (earlier_s, earlier), (later_s, later) in reversed(list(pairwise(history))):
        if earlier != later:
            break
        total_s += min(later_s - earlier_s, limit_s / 4)
    return total_s


eighths = st.integers(1, 32).map(lambda number: number / 8)  # sums of these are exact in any order
sights = st.builds(
    WorkerSample,
    step=st.integers(0, 1),
    place=st.sampled_from([Phase.STEP, Phase.WAIT, Phase.BETWEEN]),
    beats=st.integers(0, 1),
    is_stopped=st.booleans(),
)


@given(
    st.lists(
        st.tuples(eighths, st.integers(1, 8), st.dictionaries(st.integers(0, 2), sights, min_size=3)),
        max_size=12,
    )
)
def test_with_a_fixed_limit_the_blame_is_that_of_the_dumb_twin(story):
    """The twin keeps every look and counts backwards; it blames the stopped, then those at work, then those who wait, the longest over the limit first."""
    silences, now_s, history = HangDetector(fixed_s=5.0), 0.0, []
    for gap_s, times, seen in story:
        for _ in range(times):
            now_s += gap_s
            silences = silences.look(seen, now_s=now_s)
            history.append((now_s, seen))
            over = []
            for rank, sight in seen.items():
                limit_s = 10.0 if sight.place is Phase.WAIT and not sight.is_stopped else 5.0
                silence_s = dumb_silence_s([(at, sights[rank]) for at, sights in history], limit_s)
                if silence_s > limit_s:
                    kind = 0 if sight.is_stopped else 2 if sight.place is Phase.WAIT else 1
                    over.append((kind, -silence_s / limit_s, rank))
            hung = silences.hung
            assert (None if hung is None else hung.rank) == (min(over)[2] if over else None)


@given(
    st.lists(st.floats(0.01, 20.0), min_size=ENOUGH, max_size=6),
    st.lists(st.floats(0.1, TIMES), max_size=1),
)
def test_no_step_within_ten_times_the_longest_before_it_is_blamed_and_one_that_never_ends_is(known, ratios):
    """After a few steps each is up to ten times the longest before it; then the worker hangs, and is found at a limit within the bounds."""
    lengths = list(known)
    for ratio in ratios:
        lengths.append(ratio * max(lengths))
    own = [part for length_s in lengths for part in steps(1, step_s=length_s)]
    life = Life((Phase.START, 5.0), *own, (Phase.STEP, FOREVER_S), begins=Phase.START)
    began_s = life.changes[-1][0]
    hung, when_s = watch({4: life}, until_s=began_s + 2 * LONGEST_S, every_s=1.0)
    assert hung.rank == 4
    assert when_s >= began_s + SHORTEST_S
    assert min(max(TIMES * max(lengths), SHORTEST_S), LONGEST_S) <= hung.limit_s <= LONGEST_S
    assert when_s - began_s <= hung.limit_s + 4.0


class Recording:
    def __init__(self):
        self.places = []

    def beat(self, _local_rank, place):
        self.places.append(place)


def test_a_worker_counts_as_starting_until_its_second_step_is_done_and_as_waiting_only_in_a_step():
    """The first step waits for peers, too: it must not show as waiting, where the limit is that of a step that was compiled long ago."""
    page = Recording()
    pulse = HeartbeatSender(page, 0)
    for _ in range(WARMUP_STEPS):
        pulse.enter(Phase.STEP)
        with pulse.waiting():
            pulse.enter(Phase.SAVE)
        pulse.finish_step()
    assert set(page.places) == {Phase.START}
    page.places.clear()

    pulse.enter(Phase.STEP)
    with pytest.raises(RuntimeError), pulse.waiting():
        raise RuntimeError("a peer died")
    pulse.enter(Phase.SAVE)
    with pulse.waiting():
        pass
    assert page.places == [Phase.STEP, Phase.WAIT, Phase.STEP, Phase.SAVE, Phase.SAVE, Phase.SAVE]
