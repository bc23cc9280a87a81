"""What a check has found, as values. The fields are the keys of `check --json`.

docs/operations.md describes that document: change both together.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Result(StrEnum):
    """Of one proof."""

    EXACT = "exact"
    DIFFERS = "differs"
    FAILED = "failed"
    NOT_RUN = "not run"


class Verdict(StrEnum):
    """Of the whole check. UNPROVED: no difference was found, but a run could not take place."""

    EXACT = "exact"
    DIFFERS = "differs"
    FAILED = "failed"
    UNPROVED = "not proved"
    REFUSED = "refused"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the steps of one launch showed.

    seconds: how long the launch took. step, entry: of the first difference from the calm run.
    ended: how the launch ended, where that is not how it should; failure: why, in the words of the
    recipe or of the command. note: what else is to be said; of a proof that was not run, why.
    """

    proof: str
    workers: int
    result: Result
    seconds: float = 0.0
    step: int | None = None
    entry: str | None = None
    ended: str | None = None
    failure: str | None = None
    note: str | None = None

    @property
    def is_bad(self) -> bool:
        return self.result in (Result.DIFFERS, Result.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """steps: how many steps were compared, the first ones, of steps_of_run.

    notes: what the calm run said that is exact and perhaps not meant. ignored: names of logged
    values that differ between two equal commands. unproved: what keeps the verdict from being
    exact though nothing differed. not_compared: what the check says nothing about. cause: what
    usually makes the first proof fail that failed, None where its failure says it. error: why
    nothing was compared, or no more, None where all was.
    """

    recipe: str
    result: Verdict
    exit_code: int
    steps: int = 0
    steps_of_run: int = 0
    proofs: list[Proof] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    cause: str | None = None
    error: str | None = None
