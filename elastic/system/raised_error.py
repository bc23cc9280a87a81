"""What a worker's exception was and where the run stood, so that its agent knows it again.

The format stands here because `elastic.agent` must not import `elastic.worker`.
"""

from dataclasses import dataclass

from elastic.system.untrusted import Count

# A state from which that many generations made no new step gives way to the next older one.
RESTORES_OF_ONE_STATE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPlace:
    """where: as the end of a sentence, such as "in step 9"; it names the step.

    resumed: the step whose state the generation began from, None where the recipe had not asked for
    a state yet. has_older: an older one is committed. trained: how many steps this process had
    finished.
    """

    where: str
    resumed: Count | None = None
    has_older: bool = False
    trained: Count = 0


BEFORE_THE_LOOP = ErrorPlace(where="before step 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedError:
    """kind: the name of its class. line: the innermost one of the recipe, with its file."""

    kind: str
    message: str
    line: str
    place: ErrorPlace
