"""The documents can be checked: lines that fit a screen, links and names that lead somewhere."""

import re
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    chain([ROOT / "README.md", ROOT / "CHANGELOG.md"], (ROOT / "docs").rglob("*.md")),
    key=lambda path: path.relative_to(ROOT).as_posix(),
)
# History is not rewritten when a file or a test is renamed.
HISTORY = ("docs/decisions/", "CHANGELOG.md")
WIDTH = 120


def name(path):
    return path.relative_to(ROOT).as_posix()


def prose(path):
    """(number, line) of a document, without tables and code."""
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("|"):
            yield number, line


@cache
def names_of_tests():
    found = re.compile(r"^def (test_\w+)", re.MULTILINE)
    return {name for path in (ROOT / "tests").rglob("test_*.py") for name in found.findall(path.read_text())}


def is_present(document):
    return not name(document).startswith(HISTORY)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_prose_is_wrapped_at_120_columns(document):
    assert [(number, line) for number, line in prose(document) if len(line) > WIDTH] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_to_files_that_exist(document):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    inside = [target for target in targets if "://" not in target]

    assert [target for target in inside if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", list(filter(is_present, DOCUMENTS)), ids=name)
def test_modules_that_a_document_names_exist(document):
    """A module is written as in an import from the package, its folder included:
    `train/step/step.py`.
    """
    named = re.findall(r"(?<![\w/.])((?:[a-z0-9_]+/)+[a-z0-9_]+\.py)\b", document.read_text())
    places = (ROOT, ROOT / "elastic", ROOT / "elastic/rendezvous")

    assert [path for path in named if not any((place / path).is_file() for place in places)] == []


@pytest.mark.parametrize("document", list(filter(is_present, DOCUMENTS)), ids=name)
def test_tests_that_a_document_names_exist(document):
    named = set(re.findall(r"`(test_\w+)`", document.read_text()))

    assert sorted(named - names_of_tests()) == []


def test_each_file_of_the_largest_package_has_its_place_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = [path.name for path in (ROOT / "elastic" / "train").rglob("*.py") if path.name != "__init__.py"]

    assert [file for file in sorted(files) if file not in text] == []
