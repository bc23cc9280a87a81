"""The sizes of this project fall, and never grow."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# Of code lines: those with a token that is neither comment nor docstring.
# Sharded state may take 1 800 lines in all, the parts of other rooms that know of it included.
MOST_LINES = {"elastic": 22_307, "elastic/train elastic/proof": 6_867, "tests": 19_783}
MOST_FILES = {"elastic": 219, "elastic/train elastic/proof": 55}
MOST_WORDS = 19_150  # of README and docs, without decisions and the table that `make proof` makes
LONGEST_NAME = 60  # of a test
_WITH_DOCSTRING = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


@cache
def code_lines(path: Path) -> int:
    text = path.read_text()
    lines = text.split("\n")
    quiet = {number for number, line in enumerate(lines, start=1) if line.strip()[:1] in ("", "#")}
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant | ast.JoinedStr):  # an empty line within a text is one of code
            quiet -= lines_of(node)
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= lines_of(node.body[0])
    return len(lines) - len(quiet | docstrings)


def lines_of(node: ast.expr | ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or 0) + 1))


def files_of(places: str) -> list[Path]:
    """places: folders and files, by spaces."""
    found = [ROOT / place for place in places.split()]
    return [path for each in found for path in (each.rglob("*.py") if each.is_dir() else [each])]


@pytest.mark.parametrize("places", MOST_LINES)
def test_no_code_is_added_without_code_that_goes(places):
    lines = sum(code_lines(path) for path in files_of(places))
    assert lines <= MOST_LINES[places], "what do you delete for it?"


@pytest.mark.parametrize("places", MOST_FILES)
def test_no_file_is_added_without_one_that_goes(places):
    assert len(files_of(places)) <= MOST_FILES[places], "what do you delete for it?"


def test_no_words_are_added_without_words_that_go():
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    written = [path for path in documents if path.name != "proof.md"]
    assert sum(len(path.read_text().split()) for path in written) <= MOST_WORDS, "what do you delete for it?"


def test_names_of_tests_are_short():
    names = re.findall(r"def (test_\w+)", "".join(path.read_text() for path in files_of("tests")))
    assert [name for name in names if len(name) > LONGEST_NAME] == []
