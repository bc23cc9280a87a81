"""Training whose result does not depend on which machines fail.

A recipe calls `start`, names its training state in a `State`, and loops over `run.steps`. The names
below are imported on first use: a command that only reads a run directory must not wait for torch.
In a recipe the import also seeds the global generators (elastic/system/global_random.py).
"""

import importlib
from typing import Any

from elastic.system.global_random import seed_at_import

__version__ = "0.1.0"
__all__ = ["Batch", "Run", "State", "Step", "UsageError", "Values", "clip_grad_norm_", "start"]

_MODULES = {
    "Batch": "elastic.data.loader",
    "Run": "elastic.train.run",
    "State": "elastic.train.state.state",
    "Step": "elastic.train.step.step",
    "UsageError": "elastic.errors",
    "Values": "elastic.train.state.values",
    "clip_grad_norm_": "elastic.train.sharded.clip",
    "start": "elastic.train.start",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


seed_at_import()
