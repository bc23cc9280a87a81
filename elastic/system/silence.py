"""Silence counts only while its observer is watching, so a starved observer accuses no subject.

An observer polls, adds the time since its last poll to the silence of everything that gave no sign,
and takes a subject for dead or hung once its silence exceeds a limit. If the observer itself was
stopped (SIGSTOP, a suspended machine, a starved CPU), that time says nothing about the subject: its
signs could not be seen. So one poll adds at most a quarter of the limit, however long the observer
was away. A subject that was giving signs before is then far from its limit. One that gives none is
accused at the fifth poll after its first at the earliest.

It does not promise to be right: a subject that is slow, not dead, is accused as well.
"""

from dataclasses import dataclass

POLLS_WITHIN_LIMIT = 4


def longest_gap_s(limit_s: float) -> float:
    """How far apart two polls may be for an observer that was watching all the time, in seconds."""
    return limit_s / POLLS_WITHIN_LIMIT


@dataclass(frozen=True, slots=True)
class Silence:
    """How long a subject has given no sign, in seconds of its observer's attention."""

    seconds: float = 0.0

    def grow(self, elapsed_s: float, *, limit_s: float) -> "Silence":
        """One more poll without a sign, `elapsed_s` after the last poll."""
        return Silence(self.seconds + min(elapsed_s, longest_gap_s(limit_s)))
