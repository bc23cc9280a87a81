"""A variable says what its option would, unless the command line says it."""

import os

import pytest

from elastic.cli import main
from elastic.config import environment
from elastic.config.option_variables import VARIABLES, in_force, misspelt, values_of
from elastic.config.options import FLAGS, Options, parse
from elastic.errors import UsageError

# For each option: what a user writes, and another such text.
TEXTS = {
    "run_dir": ("s3://bucket/run", "runs/x"),
    "from_": ("runs/a@20:model", "runs/b"),
    "min_nodes": ("1", "2"),
    "max_nodes": ("4", "5"),
    "nproc_per_node": ("2", "auto"),
    "rdzv_backend": ("dir", "etcd"),
    "rdzv_endpoint": ("/shared/meet", "host:1"),
    "rdzv_id": ("one", "two"),
    "max_restarts": ("0", "7"),
    "save_every": ("10min", "500steps"),
    "keep": ("5", "6"),
    "snapshot_every": ("off", "7"),
    "audit": ("100", "off"),
    "rehearse": ("100", "off"),
    "balance": ("off", "auto"),
    "hang_timeout": ("60s", "off"),
    "grace_s": ("120", "2min"),
    "notice": ("aws", "gcp"),
    "notice_file": ("/run/notice", "/run/other"),
    "notice_command": ("test -e x", "false"),
    "drain_signals": ("USR1,HUP", "none"),
    "http": ("127.0.0.1:9100", "[::1]:0"),
    "tensorboard": ("boards", "other"),
    "faults": ("step 50 rank 1: kill", "step 7 rank 0: raise"),
    "last_call_s": ("3", "4s"),
    "join_window_s": ("0", "2"),
    "keep_alive_s": ("5", "6"),
    "rdzv_timeout_s": ("60", "70"),
    "local_addr": ("node-1", "node-2"),
}


def test_every_option_has_a_variable_and_none_is_one_that_means_something_else():
    """`ELASTIC_AGENT` and its like are set for workers, by an agent or a check."""
    assert VARIABLES.keys() == FLAGS.keys() == {*TEXTS, "fresh", "accept"}
    assert VARIABLES["max_nodes"] == "ELASTIC_MAX_NODES"
    assert VARIABLES["grace_s"] == "ELASTIC_GRACE"
    assert (VARIABLES["run_dir"], VARIABLES["from_"]) == (environment.RUN_DIR, environment.FROM)
    assert not environment.NO_OPTIONS & set(VARIABLES.values())
    assert len(set(VARIABLES.values())) == len(VARIABLES)


@pytest.mark.parametrize("name", TEXTS)
def test_a_variable_means_what_its_option_means_and_the_option_counts_more(name):
    text, other = TEXTS[name]
    beside = ["--rdzv-endpoint", "host:1"] if name == "rdzv_backend" else []
    values = values_of({VARIABLES[name]: text, "ELASTIC_SEARCH": "x"})

    assert parse(["a.py", *beside], values) == parse(["a.py", FLAGS[name], text, *beside])
    both = parse(["a.py", FLAGS[name], other, "--max-nodes", "9", *beside], values)
    assert both == parse(["a.py", FLAGS[name], other, "--max-nodes", "9", *beside])


def test_a_flag_is_1_or_0_and_an_empty_variable_says_nothing():
    assert parse(["a.py"], values_of({"ELASTIC_FRESH": "1"})).fresh
    assert not parse(["a.py"], values_of({"ELASTIC_FRESH": "0"})).fresh
    empty = dict.fromkeys(VARIABLES.values(), "")
    assert parse(["a.py"], values_of(empty)) == parse(["a.py"])


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("ELASTIC_MAX_NODES", "0", "ELASTIC_MAX_NODES: expected a whole number of at least 1, found '0'"),
        ("ELASTIC_FROM", "@3", "ELASTIC_FROM: expected RUN"),
        ("ELASTIC_FRESH", "true", "ELASTIC_FRESH: expected 1 or 0, found 'true'"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_variable(variable, text, says):
    with pytest.raises(UsageError, match=r"correct or unset the variable, which stands for --") as raised:
        values_of({variable: text})
    assert str(raised.value).startswith(says)
    assert raised.value.exit_code == 2


def test_the_command_says_which_options_it_has_from_variables():
    """Those that the command line does not give."""
    values = values_of({"ELASTIC_KEEP": "5", "ELASTIC_GRACE": "60"})
    options = parse(["a.py", "--keep", "7"], values)
    assert in_force(options, values) == "--grace by ELASTIC_GRACE"
    assert in_force(Options(recipe="a.py", run_dir="r"), {}) == ""


def test_a_variable_of_almost_the_name_of_an_option_is_told_and_those_of_other_programs_are_not():
    variables = dict.fromkeys(
        ["ELASTIC_MAX_NODE", "ELASTIC_PASSWORD", "ELASTIC_APM_SERVER_URL", "ELASTIC_AGENT", "ELASTIC_KEEP"],
        "1",
    )
    assert misspelt(variables, environment.NO_OPTIONS) == [
        "the variable ELASTIC_MAX_NODE stands for no option; did you mean ELASTIC_MAX_NODES?"
    ]


def test_what_a_command_starts_does_not_see_the_variables(monkeypatch):
    for name in VARIABLES.values():
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(environment.AGENT, "{}")
    assert environment.variables_of_options().keys() == set(VARIABLES.values())
    environment.drop_variables_of_options()
    assert not set(VARIABLES.values()) & os.environ.keys()
    assert environment.AGENT in os.environ


def test_a_check_does_not_obey_them(monkeypatch):
    """It compares runs of its own, each of which it starts with the options that it wants."""
    seen = []
    monkeypatch.setenv("ELASTIC_FAULTS", "step 1 rank 0: kill")
    monkeypatch.setattr("elastic.check.command.run_check", lambda _: seen.append(dict(os.environ)) or 0)
    assert main(["check", "a.py"]) == 0
    assert "ELASTIC_FAULTS" not in seen[0]
