"""What a rendezvous shows of its newest generation to an agent that its uploader has asked."""

import threading

LIMIT_S = 60.0


class Rendezvous:
    """Shows `newest`, or raises it, once `may_answer`."""

    def __init__(self, newest: int | Exception) -> None:
        self.newest = newest
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    def __call__(self) -> int:
        self.asked.set()
        assert self.may_answer.wait(LIMIT_S)
        if isinstance(self.newest, Exception):
            raise self.newest
        return self.newest
