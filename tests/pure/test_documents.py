"""The documents can be checked: links and names that lead somewhere, and a proof of each guarantee
and each failure. So can the mutants of `make mutants`: each finds its text.
"""

import re
from pathlib import Path

from mutants import MUTANTS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# History is not rewritten when a file or a test is renamed.
PRESENT = [path for path in DOCUMENTS if path.parent.name != "decisions" and path.name != "CHANGELOG.md"]
SCENARIOS = {path.stem for path in (ROOT / "tests/scenarios/cluster").glob("*.txt")}


def found(pattern, documents):
    """(document, what the pattern's group found there)."""
    return {
        (path, each) for path in documents for each in re.findall(pattern, path.read_text(), re.MULTILINE)
    }


def test_links_lead_to_files_that_exist():
    links = found(r"\]\(([^)#]+)[^)]*\)", DOCUMENTS)
    inside = {(path, target) for path, target in links if "://" not in target}
    assert {(path.name, target) for path, target in inside if not (path.parent / target).exists()} == set()


def test_modules_that_a_document_names_exist():
    """A module is written as in an import from the package, its folder included:
    `train/step/step.py`.
    """
    modules = found(r"(?<![\w/.])((?:[a-z0-9_]+/)+[a-z0-9_]+\.py)\b", PRESENT)
    places = (ROOT, ROOT / "elastic", ROOT / "elastic/rendezvous")
    assert {
        (path.name, module)
        for path, module in modules
        if not any((place / module).is_file() for place in places)
    } == set()


def test_tests_that_a_document_names_exist():
    there = {name for _, name in found(r"^def (test_\w+)", (ROOT / "tests").rglob("test_*.py"))}
    assert {(path.name, name) for path, name in found(r"`(test_\w+)`", PRESENT) if name not in there} == set()


def rows(document):
    """The names of each cell, by row of the table."""
    lines = (ROOT / "docs" / document).read_text().splitlines()
    table = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[set(re.findall(r"`([^`]+)`", cell)) for cell in row] for row in table[2:]]


def test_every_guarantee_names_a_module_and_tests():
    """That they exist is seen above."""
    for _, modules, tests in rows("guarantees.md"):
        assert len(modules) == 1 and "".join(modules).endswith(".py")
        assert tests and all(name.startswith("test_") for name in tests)


def test_every_failure_names_scenarios_or_tests_that_exist():
    proofs = [row[-1] for row in rows("failures.md")]
    assert all(proofs)
    scenarios = {name for name in set().union(*proofs) if not name.startswith("test_")}
    assert scenarios == SCENARIOS - {"undisturbed"}
    assert set(re.findall(r"scenario `(\w+)`", (ROOT / "docs/kubernetes.md").read_text())) <= SCENARIOS


def test_each_file_of_train_has_its_place_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = [path.name for path in (ROOT / "elastic" / "train").rglob("*.py") if path.name != "__init__.py"]

    assert [file for file in sorted(files) if file not in text] == []


def test_each_mutant_finds_its_text_once():
    assert [each for each in MUTANTS if (ROOT / "elastic" / each.file).read_text().count(each.old) != 1] == []
