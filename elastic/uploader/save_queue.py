"""At most one ordinary save waits behind the one in flight, the newest; a final save is never dropped for another.

It does not promise that a save which waits will be committed.
"""

from typing import Protocol, TypeVar

MOST_WAITING = 4


class Waiting(Protocol):
    @property
    def is_final(self) -> bool: ...


Each = TypeVar("Each", bound=Waiting)


def offered(waiting: tuple[Each, ...], new: Each) -> tuple[tuple[Each, ...], tuple[Each, ...]]:
    """(what waits now, oldest first; what is dropped) after `new` came.

    There is one final save per generation, so more than MOST_WAITING of them is a fault of the clients: then `new` is dropped.
    """
    kept = tuple(save for save in waiting if save.is_final)
    if len(kept) >= MOST_WAITING:
        return waiting, (new,)
    dropped = tuple(save for save in waiting if not save.is_final)
    return (*kept, new), dropped
