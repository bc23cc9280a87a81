"""Before `elastic.start` the global generators begin alike in every process of a recipe.

A new interpreter seeds them from the system's entropy: a split by `random.shuffle` before
`elastic.start` would differ between ranks and between two starts. Libraries draw from Python's and
NumPy's generators and mean no harm, so those begin with a constant. A draw from torch's, which the
recipe did not seed, is refused (train/refuse.py). `elastic.start` seeds all three for the run.
"""

import random
import sys
from typing import Any

BEFORE_START = 0


def seed_alike() -> None:
    """At the first line of a recipe; a recipe's own seeds come later and count."""
    import numpy as np

    random.seed(BEFORE_START)
    np.random.seed(BEFORE_START)  # noqa: NPY002 - the global generator is what libraries draw from


def seed_at_import() -> None:
    """At `import elastic` in a script that python or torchrun started."""
    frame: Any = sys._getframe(2)  # noqa: SLF001 - of the import's own
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    names = {} if frame is None else frame.f_globals
    # Neither `python -c` nor the command, which are no recipes.
    is_script = "__file__" in names and not names["__file__"].endswith("elastic-train")
    if names.get("__name__") == "__main__" and is_script:
        seed_alike()
