"""The time that a subject was silent, against a twin that keeps every poll."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.system.silence import Silence

LIMIT_S = 4.0
polls = st.lists(st.tuples(st.floats(0.0, 1e6), st.booleans()), max_size=30)


@given(polls)
def test_silence_is_the_watched_time_since_the_last_sign(polls: list[tuple[float, bool]]) -> None:
    """Any gaps between polls, each with or without a sign; the twin keeps them all."""
    silence = Silence()
    for index, (gap_s, has_sign) in enumerate(polls):
        silence = Silence() if has_sign else silence.grow(gap_s, limit_s=LIMIT_S)
        last_sign = max((i for i, (_, sign) in enumerate(polls[: index + 1]) if sign), default=-1)
        silent = [gap_s for gap_s, _ in polls[last_sign + 1 : index + 1]]
        assert silence.seconds == pytest.approx(sum(min(gap_s, 1.0) for gap_s in silent))
        assert silence.seconds <= sum(silent) * (1 + 1e-9)
        assert silence.seconds <= LIMIT_S or len(silent) > 4, "accused after too few polls"
