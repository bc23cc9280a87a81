"""What cannot be interrupted runs where it can be given up: on a thread that nothing joins."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Calls:
    """Runs calls one after another, on a thread that nothing waits for."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="calls", daemon=True).start()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        answer = Future[T]()
        self._waiting.put((answer, call))
        return answer

    def _run(self) -> None:
        while True:
            answer, call = self._waiting.get()
            try:
                answer.set_result(call())
            # The edge of a thread: the caller gets what was raised.
            except BaseException as error:
                answer.set_exception(error)


class GivenUp(Exception):  # noqa: N818 - as in errors.py
    """A call did not return within its share of the grace; nothing waits for its thread."""
