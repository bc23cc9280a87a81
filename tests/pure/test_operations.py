"""The guides for those who run it leave out no event and no exit code, and print what is true."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from elastic import errors
from elastic.agent.preemption import CLOUDS
from elastic.commands import command_parser
from elastic.config.options import OPTIONS_HELP, parse, split_recipe_args
from elastic.events import KINDS
from elastic.system.command_end import EXIT_CTRL_C

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = ("../README.md", "operations.md", "kubernetes.md")
CALL = re.compile(r"(?<!/)(?<!; )elastic-train \S")


def section(title):
    """The text below a heading of operations.md, up to the next one."""
    return (DOCS / "operations.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(title):
    rows = [line for line in section(title).splitlines() if line.startswith("|")][2:]
    return [row.split("|")[1].strip(" `") for row in rows]


def commands(guide):
    """Each call of elastic-train in the blocks and in the prose of a guide."""
    text = (DOCS / guide).read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(
        r"`(?:[^`\n]*-- )?(elastic-train [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    )
    found = [line[match.start() :] for line in lines if (match := CALL.search(line))]
    calls = (re.split(r"\s+[>&;]|'$", call)[0] for call in [*found, *spans])
    return [call for call in calls if call != "elastic-train --help"]


def test_every_event_has_its_row():
    assert sorted(first_cells("What to do at each event")) == sorted(KINDS)


def test_every_exit_code_has_its_row():
    # Of workers, to their agent.
    own = {errors.EXIT_PEER_LOST, errors.EXIT_DIVERGED, errors.EXIT_RECIPE, errors.EXIT_AGAIN}
    ours = {value for name, value in vars(errors).items() if name.startswith("EXIT_")} - own
    assert set(map(int, first_cells("What to do at each exit code"))) == ours | {EXIT_CTRL_C}


@pytest.mark.parametrize("guide", GUIDES)
def test_each_command_and_option_in_a_guide_is_one_that_is_taken(guide):
    found = commands(guide)
    assert found
    for command in found:
        _, *words = shlex.split(command.replace("'", ""), comments=True)
        _, parsers = command_parser()
        if words[0] in parsers:
            parsers[words[0]].parse_args(split_recipe_args(words[1:])[0])
        else:
            parse(words)

    # Options of other programs are written with their command, and not alone.
    named = set(re.findall(r"`(--[a-z-]+)", (DOCS / guide).read_text())) - {"--json"}
    assert {flag for flag in named if flag not in OPTIONS_HELP} == set()


def test_time_outs_have_their_defaults_and_metadata_variables():
    options, text = parse(["recipe.py"]), section("Time-outs, and what they depend on")
    assert {name for _, name, _ in CLOUDS.values() if f"`{name}`" not in text} == set()
    for line in text.splitlines():
        if found := re.match(r"\| `--([a-z-]+)` \| ([\d.]+) s", line):
            assert float(found[2]) == getattr(options, found[1].replace("-", "_") + "_s"), line


def test_the_skypilot_job_is_a_command_that_is_taken():
    job = yaml.safe_load((DOCS.parent / "examples" / "skypilot.yaml").read_text())
    parse(shlex.split(job["run"])[2:])
