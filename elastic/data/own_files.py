"""Which files and classes are the recipe's own: one meaning for all that looks for its mistakes.

Own is what lies neither in Python's library, nor in an installed package, nor in this one; and all
classes of the script itself. A package is installed where it lies in site-packages, or where the
record of a distribution names its files, as after `pip install --target DIR`.
"""

import csv
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

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
    if is_installed or not _LIBRARIES.isdisjoint(folders):
        return False
    return not any(str(Path(path).resolve().relative_to(each)) in _recorded(each) for each in folders)


@cache
def _recorded(folder: Path) -> frozenset[str]:
    """The files that distributions have installed in a folder, by their paths from there."""
    records = [each.read_text(errors="replace") for each in folder.glob("*.dist-info/RECORD")]
    return frozenset(row[0] for each in records for row in csv.reader(each.splitlines()) if row)


def is_own_code(thing: Any) -> bool:
    """Whether a function or a class, or the class of an object, is the recipe's."""
    return thing.__module__ == "__main__" or _is_own_module(thing.__module__)


@cache
def _is_own_module(name: str) -> bool:
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    # Without a file: what another text executes, or a part of Python.
    return module is None if path is None else is_own_file(path)
