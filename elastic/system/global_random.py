"""Before `elastic.start` the global generators begin alike in every process of a recipe.

A new interpreter seeds them from the system's entropy: a split by `random.shuffle`, or weights that
are drawn before `elastic.start`, would differ between ranks and between two starts. Libraries draw
from Python's and NumPy's generators and mean no harm, so those begin with a constant. torch's
begins with UNSEEDED, which tells `elastic.start` that the recipe did not seed it
(train/refuse.py).

A module that is not imported yet is seeded at the end of its import. `elastic.start` seeds all
three for the run.
"""

import random
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# torch's CPU generator uses 32 bits of a seed. No recipe chose a larger seed.
RECIPE_SEEDS = 2**32
UNSEEDED = 0x656C_6173_7469_6300
BEFORE_START = 0


def seed_alike() -> None:
    """At the first line of a recipe; a recipe's own seeds come later and count."""
    random.seed(BEFORE_START)
    for name, seed in _SEEDS.items():
        module = sys.modules.get(name)
        if module is None:
            sys.meta_path.insert(0, _AfterImport(name, seed))
        else:
            seed(module)


def seed_at_import() -> None:
    """At `import elastic` in a script that python or torchrun started.

    It may have imported torch already, and seeded it: then that counts.
    """
    frame: Any = sys._getframe(2)  # noqa: SLF001 - of the import's own
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    names = {} if frame is None else frame.f_globals
    # Neither `python -c` nor the command, which are no recipes.
    is_script = "__file__" in names and not names["__file__"].endswith("elastic-train")
    if names.get("__name__") == "__main__" and is_script:
        seed_alike()


def _seed_torch(torch: Any) -> None:
    generator = torch.default_generator
    if generator.initial_seed() >= RECIPE_SEEDS and not was_drawn_from(torch, generator):
        generator.manual_seed(UNSEEDED)


def was_drawn_from(torch: Any, generator: Any) -> bool:
    """Whether a torch.Generator has given numbers since it was seeded."""
    fresh = torch.Generator(device=generator.device).manual_seed(generator.initial_seed())
    return not torch.equal(fresh.get_state(), generator.get_state())


_SEEDS: dict[str, Callable[[Any], object]] = {
    "numpy.random": lambda numpy_random: numpy_random.seed(BEFORE_START),
    "torch": _seed_torch,
}


class _AfterImport:
    """A finder that seeds one module's generator once the module is imported, and then is gone."""

    def __init__(self, name: str, seed: Callable[[Any], object]) -> None:
        self._name = name
        self._seed = seed

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return None
        run = loader.exec_module

        def run_and_seed(module: ModuleType) -> None:
            run(module)
            self._seed(module)

        loader.exec_module = run_and_seed
        return spec
