"""What a loop logs of its batch is the same number on every rank, or named.

Only rank 0 writes metrics. A number of one rank's shards (what the function of `mean_loss` left in
an attribute, a validation of a part of the data) would stand there as if it were one of the batch,
and be another one at another number of workers. So ranks compare what they logged after the first
steps of a generation, then ever more rarely, and after the last step of the run. What only one rank
logs is its own business. A time or a memory that each measures of itself is named too, and the note
says that it may stay.

With one worker there is no other rank to compare with.
"""

from collections.abc import Mapping, Sequence

MANY = 256  # numbers in one comparison
_NAMED = 3
_Number = bool | int | float


class LoggedNumbers:
    """Those of one rank that are not compared yet, each name with its last step."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[int, str]] = {}
        self._steps = 0

    def add(self, step: int, logged: Mapping[str, object]) -> None:
        """At the end of each step."""
        self._steps += 1
        for name, value in logged.items():
            if isinstance(value, _Number) and (name in self._pending or len(self._pending) < MANY):
                self._pending[name] = step, repr(value)

    def is_due(self, *, is_last: bool) -> bool:
        """The same on every rank of a generation."""
        return is_last or not self._steps & (self._steps - 1)

    def take(self) -> dict[str, tuple[int, str]]:
        """Each number's step and text: JSON, for the other ranks."""
        found, self._pending = self._pending, {}
        return found


def differing(of_ranks: Sequence[Mapping[str, Sequence[object]]]) -> dict[str, list[str]]:
    """The names with other numbers in the same step, and those numbers by rank."""
    first, *others = of_ranks
    found: dict[str, list[str]] = {}
    for name, (step, text) in first.items():
        texts = [str(each[name][1]) for each in others if name in each and each[name][0] == step]
        if any(each != text for each in texts):
            found[name] = [str(text), *texts]
    return found


def note(found: Mapping[str, Sequence[str]], step: int) -> str:
    """One line for the console. found: as `differing` gives it."""
    shown = [
        f"{name} ({numbers[0]:.12} on rank 0, {next(each for each in numbers if each != numbers[0]):.12} on another)"
        for name, numbers in found.items()
    ]
    more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    return (
        f"note: by step {step} the ranks have logged other numbers for {', '.join(shown[:_NAMED])}{more}. The metrics have those of rank 0, of its own shards perhaps, which are"
        " others at another number of workers. A number of the batch: return it from the function, through step.sum, which adds it up over the shards; one of other"
        " data: run.evaluate. What each worker measures of itself may stay"
    )
