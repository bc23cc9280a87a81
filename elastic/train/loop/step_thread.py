"""The thread that asks for a step runs its body, or waits while another one does.

A generator in the background (a thread that takes the steps and puts them into a queue) asks for
the next step while the body of this one runs, perhaps before it has begun. The thread that runs the
script waits for whatever it hands on to others. So a body in another thread is told from that by
who asks, and an error that ends a thread ends the process: the script may wait for that thread for
ever.
"""

import threading

from elastic.errors import ElasticError, UsageError
from elastic.system import forked_child
from elastic.worker import script_end


class StepThread:
    """Of one loop, whose steps are asked for in the thread in which this is made."""

    def __init__(self) -> None:
        self._asking = threading.current_thread()
        self._is_side = self._asking is not threading.main_thread()
        self._last_computed = 0

    def computes(self, number: int) -> None:
        """Before the first computation of a step. Raises UsageError."""
        if self._is_side and threading.current_thread() is not self._asking:
            raise self._refusal(number)
        self._last_computed = number

    def ends(self, number: int) -> None:
        """When the next step is asked for. Raises UsageError."""
        if self._is_side and self._last_computed != number:
            raise self._refusal(number)

    def _refusal(self, number: int) -> UsageError:
        return UsageError(
            f"step {number} was taken by a thread of its own ({self._asking.name}), which asks for the next step without having computed a gradient:"
            " expected one thread that takes each step and runs the body of the loop. Write `for step in run.steps(data, state):` around the body, without a generator"
            " in the background; run.data(dataset, workers=...) loads samples ahead"
        )


def end_process_with_thread() -> None:
    """From here on, an error of this library that ends a thread ends the process."""
    before = threading.excepthook

    def hook(ended: threading.ExceptHookArgs) -> None:
        if isinstance(ended.exc_value, ElasticError) and not forked_child.is_one():
            script_end.fail(ended.exc_value)
        before(ended)

    threading.excepthook = hook
