"""The function given to `run.evaluate` leaves nothing behind that another worker would lack.

Each worker calls it for its own blocks alone, so what it counts or collects outside its result
(`correct += ...`, a meter, a list of outputs) is of some blocks, and another at another number of
workers. So after its first call in a process, what it could change is compared with what it was. If
something changed, the call is made twice more, from what was there before: what the second one
changes once more is a memory, and refused. The rest is an output, which each call replaces.
"""

from collections.abc import Callable
from typing import Any

from elastic.errors import UsageError
from elastic.train.lasting import ABSENT, content_of
from elastic.train.site import BY_NUMBERS, COPIED_BYTES, WHOLE, Form, Note, Site, note, put_back


class FirstBlock:
    """sites: what the function could change, read now; the first block is computed next."""

    def __init__(self, sites: list[Site]) -> None:
        self._sites = sites
        self._before = self._note()

    def end(self, again: Callable[[], tuple[Callable[[], object], Callable[[], object]]]) -> None:
        """The block is computed. Raises UsageError for a memory.

        again: loads the block twice, and gives for each a call of the function.
        """
        after = self._note()
        if not any(map(_names, self._sites, self._before.contents, after.contents)):
            return
        one, other = again()
        put_back(self._sites, self._before)
        one()
        first = self._note()
        other()
        second = self._note()
        put_back(self._sites, after)
        for site, *found in zip(self._sites, first.contents, second.contents, strict=True):
            for name in _names(site, *found):
                raise UsageError(
                    f"run.evaluate: {name} changes with each call of the function, which every worker calls for its own blocks alone, so that it "
                    "depends on the number of workers. Return the number from the function: run.evaluate adds up tuples and dicts of numbers and tensors "
                    "too, as in {'correct': (logits.argmax(1) == y).sum(), 'loss': losses.sum()}; predictions at their places in a tensor of zeros, as "
                    "torch.zeros(len(dataset)).index_add(0, batch.indices, found)"
                )

    def _note(self) -> Note:
        return note(self._sites, copied_bytes=COPIED_BYTES)


def _names(site: Site, before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    """What is another value."""
    if site.form is Form.CACHE:
        return []
    keys = [WHOLE] if site.form in BY_NUMBERS else list(dict.fromkeys([*before, *after]))
    values = ((key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys)
    return [site.name_of(key) for key, one, other in values if content_of(one) != content_of(other)]
