"""How far a rank is in its loop is one value, from which the end of the script is explained."""

from dataclasses import dataclass

from elastic.system.raised_error import ErrorPlace
from elastic.train.loop.leaving import StepPlace
from elastic.train.state.restore import ResumePoint
from elastic.train.step.step import Step


@dataclass(slots=True, kw_only=True)
class LoopProgress:
    """began_from: None until a state is restored. open: the step whose body the recipe runs.

    passed: the last step whose body is over, 0 before the first of this process.
    """

    began_from: ResumePoint | None = None
    open: Step | None = None
    passed: int = 0

    def close(self, step: int) -> None:
        """The body of this step is over."""
        self.open, self.passed = None, step

    @property
    def place(self) -> StepPlace:
        if self.open is not None:
            return self.open.place
        return StepPlace(step=self.passed + 1, passes=0, computed=False)

    @property
    def error_place(self) -> ErrorPlace | None:
        """Where an error is that ends the script now; None while a state is being restored."""
        began = self.began_from
        if began is None:
            return None
        passed = max(self.passed, began.step)
        where = f"after step {passed}" if passed else "before step 1"
        if self.open is not None:
            where = f"in step {self.open.number}"
        return ErrorPlace(
            where=where, resumed=began.step, has_older=began.has_older, trained=passed - began.step
        )
