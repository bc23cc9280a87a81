"""The function given to `mean_loss` or `sum` leaves nothing behind that another worker would lack.

Each worker calls it for its own shards. What it counts or collects outside its result is therefore
of some shards alone, and another at another number of workers. So in the first step of a run, and
in audited steps, what it could change is read before and after its first call (reachable.py). If
nothing changed that was not allowed before, that is all. Otherwise the call is made
again, twice for the same shard and once for another one, each from what was there before:

- What a second call of the same shard changes once more is a memory: a counter, a sum, a list that
  grows, a hidden state. It is refused.
- What each shard writes to places of its own (the priorities of its samples), or into a tensor or
  an array outside of the modules, is refused too.
- What stays at each later call, and is another number where the first call is of another shard, or
  is made with other weights (lasting.py), was initialised by the first call. It is refused.
- What makes the second call of the same shard return something else than the first (a rate of
  dropout, the mode of a teacher) is refused.
- The rest is an output, which each call replaces, or a cache, which depends on shapes alone.

A function that reads what another one of the same step left behind is found by calling it after the
other one was called for its own shard, and for other shards.

It does not find what only calls between two audits do, nor what it cannot reach. Afterwards
everything is put back, as if the function had been called for the training alone.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from elastic.data.own_files import is_own_class
from elastic.train import left_out_code
from elastic.train.audit import Auditor, Call
from elastic.train.callables import bound_by, code_key, is_wrapper, wrapped_by
from elastic.train.first_call import FirstCall

MANY_OTHERS = 7


class SideEffects:
    """Looks for them, in each function once and in audits. auditor: its parts."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        # By the codes of functions, and the objects that they work on: names of what they change.
        self._seen: dict[object, set[str]] = {}
        self._codes: set[object] = set()  # of all functions, looked at or not
        self._began: int | None = None  # the first step of this process

    def begin(
        self,
        function: Callable[..., Any],
        step: int,
        earlier: Iterable[Call] = (),
        *,
        is_audited: bool = False,
    ) -> FirstCall | None:
        """Before the first call of a pass. None of a function that was seen before, but in audits.

        earlier: calls of this step's passes before.
        """
        if self._began is None:
            self._began = step
        code = getattr(function, "__code__", type(function))
        is_known = code in self._codes
        self._codes.add(code)
        left_out_code.add(function)
        # A recovery waits for the first step of a later process: an audit looks then.
        if step > 1 and not is_audited and (is_known or step == self._began):
            return None
        key = key_of(function)
        is_again = key in self._seen
        if is_again and not is_audited:
            return None
        of_others = {each_key: each for each in earlier if (each_key := key_of(each.function)) != key}
        known = self._seen.setdefault(key, set())
        many = 1 if is_again else MANY_OTHERS
        return FirstCall(self._auditor, function, [*of_others.values()], known, many_others=many)


def key_of(function: Callable[..., Any]) -> object:
    """Two partials, or closures, of one function may change two modules or objects.

    Functions inside are looked at as the one outside; a tensor is another one in each step.
    """
    parts, waiting, seen = list[object](), [function], set[int]()
    while waiting:
        each: Any = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if is_wrapper(each) or each is function:
            parts += code_key(each)
            waiting += [*wrapped_by(each), *(bound for _, bound in bound_by(each))]
        elif isinstance(each, nn.Module) or is_own_class(type(each)):
            parts.append(id(each))
    return tuple(parts)
