"""A recipe that does not get as far as its declaration is refused before anything is written."""

import socket
from contextlib import closing

import pytest

from elastic.agent import preflight
from elastic.agent.preflight import address_of, check_command, check_run_dir, imported_first
from elastic.agent.run_directory import claim
from elastic.agent.worker_process import Spawner
from elastic.config.identity import Identity
from elastic.config.options import parse
from elastic.config.run_dir import RunDir
from elastic.errors import CannotStart, UsageError
from elastic.events import GenerationStarted
from elastic.observe.log import EventLog
from elastic.system import addresses
from elastic.testing.fakes import FakeClock

DECLARED = Identity(
    recipe="recipe.py",
    recipe_sha256="",
    arguments=(),
    seed=3,
    global_batch=64,
    shards=8,
    torch="2",
    device="cuda",
    threads=1,
)


def declared_identity(path, arguments):
    """By a process that imports everything itself."""
    with closing(Spawner(print, modules=None)) as spawner:
        return preflight.declared_identity(spawner, path, arguments)


def recipe(folder, text):
    path = folder / "recipe.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import elastic, os.path\nif 1:\n    import json\nfrom own import x", ("elastic", "os.path")),
        ("def main():\n    from elastic import start", ()),
        ("import elasticsearch", None),
        ("from .elastic import start", None),
        ("print('import elastic')  # import elastic", None),
    ],
)
def test_what_a_recipe_imports_first_is_read_from_its_text(tmp_path, text, found):
    """Without modules of its own folder. Look-alikes, comments and imports inside functions."""
    (tmp_path / "own.py").touch()
    assert imported_first(recipe(tmp_path, text)) == found


PARSER = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1, help="passes over the data")
parser.parse_args()
import elastic
elastic.start(seed=3, global_batch=64, shards=4)
raise SystemExit("a preflight goes no further than start")
"""


def test_the_help_of_the_recipe_is_shown_and_is_no_error(tmp_path, capfd):
    """`-- --help` ends well without a declaration."""
    with pytest.raises(SystemExit) as stop:
        declared_identity(recipe(tmp_path, PARSER), ("--help",))
    assert stop.value.code == 0
    assert "passes over the data" in capfd.readouterr().out


def test_a_recipe_declares_its_run_and_goes_no_further(tmp_path, capfd, monkeypatch):
    """Nothing else happens: no folder, no output, no line after `start`. Variables that another
    launcher left behind say nothing of this run.
    """
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("RANK", "many")
    identity = declared_identity(recipe(tmp_path, PARSER), ("--epochs", "2"))
    assert (identity.recipe, identity.arguments) == ("recipe.py", ("--epochs", "2"))
    assert (identity.seed, identity.global_batch, identity.shards) == (3, 64, 4)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["recipe.py"]
    assert "no further" not in "".join(capfd.readouterr())


def test_nodes_that_find_no_shards_are_spares_and_no_error(tmp_path, capsys):
    """The first command of the README, on a machine with so many GPUs. What can never find enough
    is refused.
    """
    run = RunDir.parse(str(tmp_path))
    for nproc, says in (
        (2, ""),
        (3, "8 shards: 2 of the nodes train, with 3 workers each; more are spares\n"),
    ):
        options = parse(["recipe.py", "--min-nodes", "1", "--max-nodes", "4"])
        assert check_run_dir(options, DECLARED, run, nproc) == (DECLARED, True)
        assert capsys.readouterr().out == says
    for nproc, least in ((9, 1), (5, 2)):
        options = parse(["recipe.py", "--min-nodes", str(least), "--max-nodes", "4"])
        with pytest.raises(UsageError, match=f"shards \\(8\\), found {least} nodes of {nproc} workers"):
            check_run_dir(options, DECLARED, run, nproc)


def test_a_loopback_name_is_refused_where_others_may_come(monkeypatch):
    """Debian's /etc/hosts has the machine's own name at 127.0.1.1. The others look it up elsewhere,
    and would find no one listening there.
    """
    real = socket.getaddrinfo

    def looked_up(host, *rest, **options):
        return real("127.0.1.1" if host == "node-1" else host, *rest, **options)

    monkeypatch.setattr(addresses.socket, "getaddrinfo", looked_up)
    with pytest.raises(UsageError, match=r"'node-1' is 127\.0\.1\.1 here; give --local-addr as a number"):
        address_of(parse(["r.py", "--local-addr", "node-1", "--max-nodes", "2"]))
    for words in (
        "--local-addr node-1",
        "--local-addr localhost --max-nodes 2",
        "--local-addr 127.0.1.1 --max-nodes 2",
    ):
        assert address_of(parse(["r.py", *words.split()])) == words.split()[1]


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_script_and_a_recipe_share_no_run_directory(tmp_path, is_plain):
    """Each would take the other's steps, saves and end for its own."""
    run, declared = RunDir.parse(str(tmp_path)), [DECLARED, None]
    started = GenerationStarted(world_size=1, nodes=["n"], cause="start", restarts=0, plain=is_plain)
    EventLog(run.events / "n-agent.jsonl", node="n", clock=FakeClock()).record(started)
    claim(run, declared[is_plain], FakeClock())
    with pytest.raises(UsageError, match="found one of the other kind"):
        claim(run, declared[not is_plain], FakeClock())


def test_two_urls_of_like_names_have_local_folders_of_their_own():
    """Each character that no file name may have becomes the same one."""
    urls = ["s3://b/x/y", "s3://b/x-y", "s3://b-x/y", "gs://b/\u00fc/1", "gs://b/\u00f6/1"]
    assert len({RunDir.parse(url).local for url in urls}) == len(urls)
    assert RunDir.parse("s3://b/x/").local == RunDir.parse("s3://b/x").local


def test_a_recipe_killed_before_its_start_made_no_mistake(tmp_path):
    """As the kernel does where memory is short."""
    killed = "import os, elastic\nos.kill(os.getpid(), 9)\n"
    with pytest.raises(CannotStart, match="was killed before it had reached"):
        declared_identity(recipe(tmp_path, killed), ())


def test_fresh_is_refused_for_a_run_directory_at_a_url(tmp_path, monkeypatch):
    """A folder may begin anew, also in a job that Slurm has not requeued."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    url = ["recipe.py", "--run-dir", "memory://bucket/run"]
    check_command(parse(url))
    check_command(parse(["recipe.py", "--run-dir", str(tmp_path / "run"), "--fresh"]))
    with pytest.raises(UsageError, match=r"expected a folder with --fresh, .* take another --run-dir"):
        check_command(parse([*url, "--fresh"]))
