"""Where the recipe ended its run early is written down before the state that it ended with.

A run ends after its last step, or earlier where the recipe left the loop. Whatever loads the last
state must know that no step follows it: the recipe itself may not decide the same again, if it
decided by a variable of the loop. So the record is created first; a worker that dies between the
two finds it, trains up to its step and ends there.

It does not say that the run is finished: a checkpoint of its step does.
"""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

from elastic.errors import StoreFailed, UsageError
from elastic.storage.store import Store, create_or_read, read_small
from elastic.system.clock import Clock
from elastic.system.untrusted import Count, decode, exactly

NAME = "stopped.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRecord:
    """step: the last one. steps: those that the run would have had. reason: the recipe's."""

    run_id: str
    step: Count
    steps: Count
    reason: str
    format: Annotated[int, exactly(FORMAT)] = FORMAT

    def __str__(self) -> str:
        return f"stopped by the recipe after step {self.step} of {self.steps} ({self.reason})"

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def read(store: Store, run_id: str, clock: Clock) -> StopRecord | None:
    """store: of the run directory. None where the run was not stopped.

    Raises UsageError for a file that is no record, and StoreFailed.
    """
    data = read_small(store, NAME, clock)
    found = None if data is None else parse(data)
    return found if found is not None and found.run_id == run_id else None


def create(store: Store, record: StopRecord, clock: Clock) -> None:
    """Raises StoreFailed; UsageError where another end of this run is written down already."""
    found = parse(create_or_read(store, NAME, record.to_json(), clock))
    if found.run_id != record.run_id:
        raise StoreFailed(f"{NAME} in the run directory is of another run; remove it")
    if found.step != record.step:
        raise UsageError(
            f"the recipe left the loop after step {record.step}, but this run was {found} before: the recipe decides by something"
            f" that is no part of the state, such as a variable of the loop; keep it in elastic.Values"
        )


def parse(data: bytes) -> StopRecord:
    """Raises UsageError for bytes that are no record."""
    try:
        return decode(StopRecord, data, what=NAME)
    except ValueError as error:
        raise UsageError(
            f"{error}; where the run ends is not known: put {NAME} of the run directory back as it was, or remove it to train on"
        ) from error
