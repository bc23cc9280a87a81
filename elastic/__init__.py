"""Training whose result does not depend on what broke: a recipe calls `start`, names its `State`, and loops over `run.steps`.

The names are found on first use, so that the commands that only read a run directory do not wait for torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Batch", "Run", "State", "Step", "UsageError", "start"]

_PLACES = {
    "Batch": "elastic.data.loader",
    "Run": "elastic.train.run",
    "State": "elastic.train.state",
    "Step": "elastic.train.step",
    "UsageError": "elastic.errors",
    "start": "elastic.train.start",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
