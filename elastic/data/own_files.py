"""Which files and classes are the recipe's own: one meaning for all that looks for its mistakes.

Own is what lies neither in Python's library, nor in an installed package, nor in this one; and all
classes of the script itself.
"""

import sys
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch

import elastic

_LIBRARIES = frozenset(
    {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    # These may lie in folders of their own, where they are developed.
    | {Path(package.__file__ or "").resolve().parent for package in (elastic, torch, np)}
)
_INSTALLED = "site-packages", "dist-packages"


@cache
def is_own_file(path: str) -> bool:
    """Whether a file of code is the recipe's, and no library's."""
    if path.startswith("<frozen"):
        return False
    folders = Path(path).resolve().parents
    is_installed = any(each.name in _INSTALLED for each in (*folders, *Path(path).parents))
    return not is_installed and _LIBRARIES.isdisjoint(folders)


def is_own_class(kind: type) -> bool:
    return kind.__module__ == "__main__" or _is_own_module(kind.__module__)


@cache
def _is_own_module(name: str) -> bool:
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    # Without a file: what another text executes, or a part of Python.
    return module is None if path is None else is_own_file(path)
