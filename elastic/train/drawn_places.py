"""Where the recipe's own code has seeded a generator from the operating system, by file and line.

Of NumPy's generators that is the innermost own line, also where a library makes one for it; of
Python's, libraries make many for names and pauses, so that only calls in own code count. A copy of
a generator begins as an unseeded one and gets its state later; nor is what a library makes at its
import the recipe's.
"""

import ast
import random
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

import elastic
from elastic.data.own_files import is_own_file
from elastic.system import unseeded_calls
from elastic.system.unseeded_calls import Stack
from elastic.train.recipe_text import called
from elastic.train.text_place import TextPlace, place_at

_PYTHONS = random.Random.__init__.__code__.co_filename
_WATCH = unseeded_calls.__file__
_THIS_LIBRARY = f"{Path(elastic.__file__).parent}/"
_COPYING = "numpy/random/_pickle.py", "/copy.py"
_GETS_STATE_LATER = "load", "loads", "jumped"
_MOST_SHOWN = 60  # characters of a call


class DrawnPlaces:
    """Each line is given once. Not the same as a text's lines: a call may be made in any step."""

    def __init__(self) -> None:
        self._given = set[str]()
        self._seen = 0

    def has_new(self) -> bool:
        """It costs next to nothing, for each step."""
        return unseeded_calls.number() > self._seen

    def new(self, of_text: Iterable[str] = ()) -> list[str]:
        """As `train.py:12 (default_rng(seed))`. of_text: places of this form, which come first."""
        stacks = unseeded_calls.stacks()
        made = (place_in(each) for each in stacks[self._seen :])
        self._seen = len(stacks)
        found = dict[str, str]()
        for each in (*of_text, *made):
            line = each.partition(" ")[0]
            if line and line not in self._given:
                found.setdefault(line, each)
        self._given |= found.keys()
        return [*found.values()]


def place_in(stack: Stack) -> str:
    """Empty where it is not the recipe's."""
    frames = [(code, offset) for code, offset in stack if code.co_filename != _WATCH]
    is_pythons = bool(frames) and frames[0][0].co_filename == _PYTHONS
    without_text = ""
    for code, offset in frames:
        path = code.co_filename
        if path == _PYTHONS:
            continue
        if not is_own_file(path):
            if is_pythons or _is_end(path):
                break
            continue
        place = place_at(code, offset)
        if place.path:
            return _words(place)
        without_text = without_text or f"{Path(path).name}:{place.line} ({_function(code)})"
    return without_text


def _is_end(path: str) -> bool:
    """Whether what is above in the stack has not asked for the generator."""
    return path.startswith(("<frozen importlib", _THIS_LIBRARY)) or path.endswith(_COPYING)


def _words(place: TextPlace) -> str:
    call = next((each for each in reversed(place.path) if isinstance(each, ast.Call)), None)
    if call is None:
        return f"{place} ({_function(place.code)})"
    name, text = called(call), ast.unparse(call)
    if name in _GETS_STATE_LATER:
        return ""
    shown = text if len(text) <= _MOST_SHOWN else f"{name or 'a call'}(...)"
    return f"{Path(place.code.co_filename).name}:{call.lineno} ({shown})"


def _function(code: CodeType) -> str:
    return f"in {code.co_name.strip('<>')}"
