"""A loop ends once: after its last step, or where the recipe left it; nothing after that is lost.

`break`, `return`, an exception that the recipe catches, and the end of the script all leave a loop,
and none of them tells the iterator. CPython closes a generator as soon as nothing refers to it. If
a `break` or a `return` dropped the last reference, the run ends there and then, before the recipe's
next line. In every other case an exception may be on its way through the recipe, which its iterator
cannot see: then the end of the script decides. A script that ends well has left the loop, and one
that fails has failed. Until then the recipe may change its objects, so their checksum is taken when
the generator is closed.

It does not see a loop left whose iterator a variable holds: it saves the state at the end of the
script, and says so.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import CO_GENERATOR
from opcode import opname
from types import FrameType
from typing import Self

from elastic.errors import ElasticError, PeerLost, UsageError
from elastic.system import forked_child
from elastic.train.loop.leaving import explain_loss
from elastic.train.loop.loop import Loop
from elastic.train.step.step import Step
from elastic.worker import script_end

LEFT = "the recipe left the loop"
# What a frame executes when it drops the iterator of a `for` loop that it leaves. Neither can
# raise, so no exception is on its way.
_DROPS = ("POP_TOP", "POP_ITER")


class OneLoop(Iterator[Step]):
    """The steps, for one loop over them: what asks for an iterator later begins a second one."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps = steps
        self._has_begun = False

    def __iter__(self) -> Self:
        if self._has_begun:
            raise UsageError(
                "a second loop over the steps began, and a process that restarts begins with the first one, at any step: write one"
                " loop, which asks step.epoch, step.ends_epoch or step.number"
            )
        return self

    def __next__(self) -> Step:
        self._has_begun = True
        return next(self._steps)


class LoopEnd:
    """The one loop of a run, whose steps the recipe iterates over.

    ended: called once, when the last state is committed.
    """

    def __init__(self, loop: Loop, ended: Callable[[], None]) -> None:
        self.loop = loop
        self._ended = ended
        self._is_over = False  # it ended, or an error inside it is on its way
        self._error: BaseException | None = None  # that ended the loop
        self._caught: ElasticError | None = None  # after the loop: other ranks still wait in that call
        # Checksum of the state when the iterator was dropped, which did not tell whether an
        # exception is on its way.
        self._left_as: str | None = None

    def steps(self) -> Iterator[Step]:
        return OneLoop(self._steps())

    def _steps(self) -> Iterator[Step]:
        try:
            yield from self.loop.run()
        except GeneratorExit:
            self._drop(sys._getframe().f_back)  # noqa: SLF001 - the frame that dropped it
            raise
        except BaseException as error:
            self._is_over, self._error = True, error
            raise
        self._is_over = True
        self._ended()

    def note_error(self, error: ElasticError, *, is_of_all_ranks: bool) -> None:
        """The recipe may catch it. is_of_all_ranks: of a call in which all ranks meet."""
        if self.loop.step is not None:
            self.loop.step.error = self.loop.step.error or error
        elif is_of_all_ranks:
            self._caught = self._caught or error

    def settle(self) -> None:
        """Before the recipe has ranks meet outside of the loop: end the loop if it was left.

        Raises UsageError if the state was changed after the loop, what the end of a run raises, and
        the error of an earlier meeting, if the recipe caught it.
        """
        if self._caught is not None:
            raise self._caught
        if self._left_as is not None and self._is_left:
            if self._left_as != self.loop.own_checksum():
                raise UsageError(
                    f"the recipe left the loop in step {self.loop.place.step} and then changed the state: "
                    "expected the state of that step. Leave `for step in run.steps(...)` with break or return, or call run.stop(reason)"
                )
            self._leave()

    def script_ended(self) -> None:
        """What `settle` does; a loop whose iterator a variable holds ends here too.

        Raises the error that ended the loop, or a computation in it, if the recipe caught it.
        """
        if self._error is not None:
            raise self._error
        self.settle()
        if self._is_left:
            self.loop.say(
                "a variable of the recipe still holds the iterator of its loop: the run ends with the state that it has now, at the end"
                " of the script"
            )
            self._leave()
        if (sharded := self.loop.parts.state.sharded) is not None and not forked_child.is_one():
            with suppress(PeerLost):  # which is done already
                sharded.goes_on()

    def explain(self, error: BaseException) -> BaseException:
        """A rank that waits for a peer which left the loop sees that it is gone."""
        if not isinstance(error, PeerLost) or forked_child.is_one():
            return error
        return explain_loss(self.loop.parts.groups, self.loop.place) or error

    @property
    def _is_left(self) -> bool:
        """Whether the recipe has left the loop in a step, unless it is still in the loop.

        A child that the recipe forked leaves nothing: the loop is that of its parent.
        """
        return not self._is_over and self.loop.step is not None and not forked_child.is_one()

    def _drop(self, by: FrameType | None) -> None:
        if not self._is_left:
            return
        if not is_left_by_break(by):
            self._left_as = ""
            with suppress(Exception):  # one may be on its way already, and matters more
                self._left_as = self.loop.own_checksum()
            return
        try:
            self._leave()
        # This is a finalizer, which would swallow the exception, and the recipe would go on.
        except BaseException as error:
            script_end.fail(error)

    def _leave(self) -> None:
        self._is_over = True
        self.loop.leave(LEFT)
        self._ended()


def is_left_by_break(frame: FrameType | None) -> bool:
    """Whether `frame`, which closes a generator now, does so because it leaves a `for` loop.

    A generator between the loop and the iterator (tqdm) is closed first and closes ours while it
    unwinds from its `yield`: then the frame that closes that one tells.
    """
    while frame is not None:
        doing = opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else ""
        is_closing = frame.f_code.co_flags & CO_GENERATOR and doing in ("YIELD_VALUE", "RESUME")
        if not is_closing:
            return doing in _DROPS
        frame = frame.f_back
    return False
