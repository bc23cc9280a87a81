"""The chain value of each step of a run, in 16 bytes a step: runs of a million steps are compared.

It does not promise to tell values apart whose first 64 bits agree: a run writes no more of a chain.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.observe.step_batch import Ints, StepBatch
from elastic.observe.step_line import CHAIN_DIGITS

Bits = NDArray[np.uint64]
_DIGITS = re.compile("[0-9a-f]*", re.ASCII)


class StepChains:
    """last_step: of the last line, also of one without a value; 0 before the first.

    num_unreadable: lines that are none of a step.
    """

    def __init__(self) -> None:
        self.last_step = self.num_unreadable = 0
        self._steps, self._bits = array("q"), array("Q")

    def add(self, batch: StepBatch) -> None:
        """The next lines."""
        self.num_unreadable += batch.num_unreadable
        if not len(batch):
            return
        self.last_step = int(batch.step[-1])
        steps, bits = batch.step, _bits_of_a_run(batch.chain)
        if bits is None:
            found = [*map(_bits, batch.chain)]
            steps = steps[np.array([each is not None for each in found], np.bool_)]
            bits = np.array([each for each in found if each is not None], np.uint64)
        self._steps.frombytes(steps.tobytes())
        self._bits.frombytes(bits.tobytes())

    def by_step(self) -> tuple[Ints, Bits]:
        """The steps that have a value, ascending, and those values; each of shape (steps,).

        Of several lines of one step the last counts.
        """
        steps, bits = np.frombuffer(self._steps, np.int64), np.frombuffer(self._bits, np.uint64)
        # `unique` finds the first of equal ones, which is the last one of the reversed array.
        found, places = np.unique(steps[::-1], return_index=True)
        return found, bits[::-1][places]


def _bits_of_a_run(chains: Sequence[Any]) -> Bits | None:
    """All at once; None unless a run could have written each."""
    if not all(type(each) is str and len(each) == CHAIN_DIGITS for each in chains):
        return None
    digits = "".join(chains)
    if not _DIGITS.fullmatch(digits):
        return None
    return np.frombuffer(bytes.fromhex(digits), ">u8").astype(np.uint64)


def _bits(chain: Any) -> int | None:
    """64 bits: the value itself, or a hash of what no run writes. None for what has none."""
    if chain is None:
        return None
    if (own := _bits_of_a_run([chain])) is not None:
        return int(own[0])
    try:
        text = json.dumps(chain, sort_keys=True)
    except RecursionError:  # it is not compared
        return None
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
