"""`elastic-train serve` shows a run live, to those who ask it by its own name, and only reads."""

import json
import socket
from contextlib import ExitStack

import drawn_runs
import pytest
from page_server import served

from elastic.commands import command_parser
from elastic.config.run_dir import RunDir
from elastic.errors import UsageError
from elastic.report import views
from elastic.report.http_server import is_own_name
from elastic.testing.fakes import FakeClock

HEADLINE = "document.getElementById('headline').textContent"
NOTICE = "document.getElementById('notice')"


@pytest.fixture
def run(tmp_path):
    return drawn_runs.write(tmp_path / "run", *drawn_runs.of_generations(3, 40))


@pytest.fixture
def serve():
    with ExitStack() as stack:
        yield lambda run, *words: stack.enter_context(served(run, *words))


def put(run, other):
    """The files of another run, in place of those of this one."""
    for name in ("events/all.jsonl", "metrics.jsonl"):
        (other / name).replace(run / name)


def test_serve_answers_with_the_page_and_changes_nothing(run, serve):
    def files():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}

    before, server = files(), serve(run)
    assert "can read it" not in server.said
    status, headers, page = server.ask()
    assert status == 200
    assert b"Finished: 120 steps" in page
    for rule in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert rule in headers["Content-Security-Policy"]
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")

    status, headers, body = server.ask("/picture.json")
    assert (status, json.loads(body)["state"]) == (200, "finished")
    # DNS rebinding: the browser sends the other site's name, whatever address that name has.
    assert server.ask("/picture.json", Host=f"attacker.example:{server.port}")[0] == 403
    assert server.ask(Host=f"localhost:{server.port}")[0] == 200
    assert files() == before


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("[::1]:8080", True),
        ("Node-7:80", True),
        (socket.gethostname(), True),
        ("127.0.0.1.attacker.example:8080", False),
        (None, False),
    ],
)
def test_an_own_name_is_an_address_or_what_the_server_was_told(host, is_own):
    assert is_own_name(host, "node-7") is is_own


def test_it_listens_where_it_is_told_and_says_who_can_read_it(run, serve, tmp_path, printed, monkeypatch):
    assert str(command_parser()[1]["serve"].parse_args(["runs/x"]).listen) == "127.0.0.1:8080"
    assert serve(run, "--listen", "0.0.0.0:0").said.endswith("; who reaches this address can read it\n")
    monkeypatch.setattr("os.nice", lambda _more: None)  # what follows runs in this process
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        said = printed(2, "serve", run, "--listen", where)
        assert f"expected to listen on {where}, found: Address already in use" in said
    said = printed(2, "serve", tmp_path, "--listen", "127.0.0.1:0")
    assert "expected a run directory, found no run in" in said


def test_an_open_page_shows_new_steps_and_a_lost_server(run, serve, chromium, tmp_path):
    """What the reader had zoomed to, where the page was scrolled to and where the keys are stay."""
    server = serve(run)
    page = chromium.open(f"http://127.0.0.1:{server.port}/")
    assert page.evaluate(HEADLINE).startswith("Finished: 120 steps")
    page.evaluate("page.timelines[0].show({ from: 1, to: 5 })")
    page.evaluate("document.querySelector('button.reset').focus()")
    y = page.evaluate("(scrollTo(0, 1e9), scrollY)")

    put(run, drawn_runs.write(tmp_path / "longer", *drawn_runs.of_generations(3, 50)))
    assert page.wait(f"{HEADLINE}.startsWith('Finished: 150 steps')")
    assert page.evaluate("page.views[0]") == {"from": 1, "to": 5}
    assert page.evaluate("scrollY") == y > 500
    assert page.evaluate("document.activeElement.className") == "reset"
    assert page.complaints() == []

    server.process.kill()
    assert page.wait(f"!{NOTICE}.hidden && {NOTICE}.textContent") == (
        "Not up to date: elastic-train serve does not answer; start it again"
    )
    page.close()


def test_a_run_that_can_no_longer_be_read_says_so_until_it_can(run):
    clock = FakeClock()
    source = views.RunSource(RunDir.parse(str(run)), clock)
    assert source.view()
    aside = run.rename(run.with_name("aside"))
    run.write_text("no folder")
    clock.sleep(100.0)
    for _ in range(2):
        with pytest.raises(UsageError, match="found no run in"):
            source.view()
    run.unlink()
    aside.rename(run)
    assert source.view()
