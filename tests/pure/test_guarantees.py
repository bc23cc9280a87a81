"""Each promise of docs/guarantees.md and docs/failures.md names a module and a test that exist."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NONE = "–"  # noqa: RUF001 - the dash of the table


def rows(name):
    lines = (ROOT / "docs" / name).read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return cells[2:]


def scenarios_of(row):
    """The scenarios that the last cell but one names; it may name none."""
    return [] if row[-2] == NONE else [name.strip(" `") for name in row[-2].split(",")]


@cache
def names_of_tests():
    found = re.compile(r"^def (test_\w+)", re.MULTILINE)
    return {name for path in (ROOT / "tests").rglob("test_*.py") for name in found.findall(path.read_text())}


@pytest.mark.parametrize("row", rows("guarantees.md"), ids=lambda row: row[0][:40])
def test_every_guarantee_names_a_module_and_a_test_that_exist(row):
    _, module, test = row

    assert (ROOT / module.strip("`")).is_file()
    assert test.strip("`") in names_of_tests()


@pytest.mark.parametrize("row", rows("failures.md"), ids=lambda row: row[0][:40])
def test_every_failure_names_an_existing_test_or_a_scenario(row):
    """A scenario is as good a proof as a test."""
    test = row[-1].strip("`")

    assert test in names_of_tests() or (test == NONE and scenarios_of(row))


@pytest.mark.parametrize("row", rows("failures.md"), ids=lambda row: row[0][:40])
def test_every_scenario_that_a_failure_names_exists(row):
    for scenario in scenarios_of(row):
        assert (ROOT / "tests/scenarios/cluster" / f"{scenario}.txt").is_file()


def test_every_scenario_with_a_fault_is_named_by_a_failure():
    named = {name for row in rows("failures.md") for name in scenarios_of(row)} | {"undisturbed"}
    there = {path.stem for path in (ROOT / "tests/scenarios/cluster").glob("*.txt")}

    assert there <= named
