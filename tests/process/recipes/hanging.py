"""tiny.py, but in one step one rank never returns from its loss function, once.

HANG_AT     "STEP RANK"
HANG_ONCE   A file that exists once that has happened.
"""

import os
from pathlib import Path

import tiny
from torch import nn

import elastic  # noqa: F401 - the agent looks for it here

STEP, RANK = map(int, os.environ.get("HANG_AT", "0 0").split())
ONCE = Path(os.environ.get("HANG_ONCE", "."))
stands_at_gate, loss_of = tiny.wait_at_gate, nn.functional.cross_entropy
now = {"step": 0, "rank": 0}


def wait_at_gate(folder: Path, number: int, rank: int) -> None:
    now.update(step=number, rank=rank)
    stands_at_gate(folder, number, rank)


def spin_for_ever() -> None:
    while True:
        pass


def cross_entropy(*arguments):
    if (now["step"], now["rank"]) == (STEP, RANK) and not ONCE.exists():
        ONCE.touch()
        spin_for_ever()
    return loss_of(*arguments)


tiny.wait_at_gate, nn.functional.cross_entropy = wait_at_gate, cross_entropy

if __name__ == "__main__":
    tiny.main()
