"""A recipe that does not get as far as its declaration is refused before anything is written."""

import socket

import pytest
from records import IDENTITY

from elastic.agent.preflight import address_of, check_command, check_run_dir, imported_first
from elastic.agent.run_directory import claim
from elastic.config.options import parse
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.events import GenerationStarted
from elastic.observe.log import EventLog
from elastic.system import addresses
from elastic.testing.fakes import FakeClock


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
    recipe = tmp_path / "recipe.py"
    recipe.write_text(text)
    assert imported_first(recipe) == found


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
        assert check_run_dir(options, IDENTITY, run, nproc) == (IDENTITY, True)
        assert capsys.readouterr().out == says
    for nproc, least in ((9, 1), (5, 2)):
        options = parse(["recipe.py", "--min-nodes", str(least), "--max-nodes", "4"])
        with pytest.raises(UsageError, match=f"shards \\(8\\), found {least} nodes of {nproc} workers"):
            check_run_dir(options, IDENTITY, run, nproc)


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
    run, declared = RunDir.parse(str(tmp_path)), [IDENTITY, None]
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


def test_fresh_is_refused_for_a_run_directory_at_a_url(tmp_path, monkeypatch):
    """A folder may begin anew, also in a job that Slurm has not requeued."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    url = ["recipe.py", "--run-dir", "memory://bucket/run"]
    check_command(parse(url))
    check_command(parse(["recipe.py", "--run-dir", str(tmp_path / "run"), "--fresh"]))
    with pytest.raises(UsageError, match=r"expected a folder with --fresh, .* take another --run-dir"):
        check_command(parse([*url, "--fresh"]))
