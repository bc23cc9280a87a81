"""An uploader that dies is started again for as long as its owner lives, ever more rarely.

The first start comes at once, because most deaths are single ones. It does not promise that a start
helps.
"""

from dataclasses import dataclass

STABLE_S = 2.0  # a process that lived so long did not die of its start
LONGEST_PAUSE_S = 30.0
# From here on it is said that nothing is saved.
MANY_DEATHS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class UploaderDeath:
    """reason: how it ended, or why it could not be started. deaths: in a row. pause_s: until the
    next start.
    """

    reason: str
    deaths: int
    pause_s: float

    def __str__(self) -> str:
        if self.deaths >= MANY_DEATHS:
            return (
                f"the uploader died {self.deaths} times in a row ({self.reason}): NOTHING IS SAVED until it runs again. It is started "
                f"ever more rarely, now in {self.pause_s:g} s, and training goes on; its own messages, above, and the memory of this machine may say why"
            )
        when = f"in {self.pause_s:g} s" if self.pause_s else "now"
        return f"the uploader died ({self.reason}) and is started again {when}; a save in progress is lost, training goes on"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartBackoff:
    """deaths: in a row, each within STABLE_S of its start. due_s: of the next start, on the
    monotonic clock.
    """

    deaths: int = 0
    due_s: float = 0.0

    @property
    def pause_s(self) -> float:
        """0, 0.5, 1, 2, 4, ... seconds after the deaths in a row."""
        doublings = min(self.deaths - 2, 10)
        return min(LONGEST_PAUSE_S, 0.5 * 2.0**doublings) if self.deaths > 1 else 0.0

    def died(self, *, lived_s: float, now_s: float) -> "RestartBackoff":
        after = RestartBackoff(deaths=1 if lived_s >= STABLE_S else self.deaths + 1)
        return RestartBackoff(deaths=after.deaths, due_s=now_s + after.pause_s)
