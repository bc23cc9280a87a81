"""`elastic-train serve` shows a run live, to those who ask it by its own name, and only reads."""

import json
import select
import signal
import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import drawn_runs
import pytest
from page_server import LIMIT_S, served

from elastic.cli import main
from elastic.commands import command_parser
from elastic.config.run_dir import RunDir
from elastic.report import live_picture
from elastic.report.live_picture import LivePicture, NotNow
from elastic.report.picture.draw import draw
from elastic.report.polling import folder_id
from elastic.report.serve import is_own_name
from elastic.testing.fakes import FakeClock


@pytest.fixture
def run(tmp_path):
    return drawn_runs.write(tmp_path / "run", *drawn_runs.of_generations(3, 40))


@pytest.fixture
def serve():
    with ExitStack() as stack:
        yield lambda run, *words: stack.enter_context(served(run, *words))


def test_the_answers_are_the_page_and_its_picture_and_an_unchanged_one_is_not_sent_again(run, serve):
    server = serve(run)
    status, headers, page = server.ask()
    assert status == 200
    assert b"Finished: 120 steps" in page
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]

    status, headers, body = server.ask("/picture.json")
    assert (status, json.loads(body)["state"]) == (200, "finished")
    assert server.ask("/picture.json", If_None_Match=headers["ETag"])[0::2] == (304, b"")
    assert server.ask("/picture.json", method="HEAD")[0::2] == (200, b"")
    assert server.ask("/../../etc/passwd")[0] == 404


def test_it_changes_no_folder_id_the_run(run, serve):
    def files():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}

    before = files()
    server = serve(run)
    server.ask()
    assert server.ask(method="POST")[0] == 501
    assert server.ask(method="PUT")[0] == 501
    assert files() == before


def test_a_page_whose_name_leads_here_is_refused(run, serve):
    """DNS rebinding: the browser sends the other site's name, whatever address that name has."""
    server = serve(run)
    status, _, body = server.ask(Host="attacker.example")
    assert status == 403
    assert b"Finished" not in body
    assert server.ask("/picture.json", Host=f"attacker.example:{server.port}")[0] == 403
    assert server.ask(Host=f"localhost:{server.port}")[0] == 200


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1:8080", True),
        ("localhost", True),
        ("[::1]:8080", True),
        ("10.1.2.3", True),
        ("Node-7:80", True),
        (socket.gethostname(), True),
        ("attacker.example", False),
        ("127.0.0.1.attacker.example:8080", False),
        ("localhost.attacker.example", False),
        ("", False),
        (None, False),
        (":8080", False),
    ],
)
def test_an_own_name_is_an_address_or_what_the_server_was_told(host, is_own):
    assert is_own_name(host, "node-7") is is_own


def test_ctrl_c_ends_it(run, serve):
    server = serve(run)
    server.ask()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(LIMIT_S) == 0
    assert server.process.stdout.read() == ""


def test_a_port_in_use_and_a_folder_without_a_run_get_a_sentence(run, serve, tmp_path):
    server = serve(run)
    second = serve(run, "--listen", f"127.0.0.1:{server.port}")
    assert second.process.wait(LIMIT_S) == 2
    assert f"expected to listen on 127.0.0.1:{server.port}, found: Address already in use" in second.said

    empty = serve(tmp_path, "--listen", "127.0.0.1:0")
    assert empty.process.wait(LIMIT_S) == 2
    assert "expected a run directory, found no run in" in empty.said


def test_a_run_whose_files_cannot_be_read_gets_the_sentence_of_report(serve, tmp_path, capsys):
    """A link that leads to itself, in the place of the events."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "events").symlink_to("events")
    server = serve(run, "--listen", "127.0.0.1:0")
    assert server.process.wait(LIMIT_S) == 2
    assert "Traceback" not in server.said
    assert main(["report", str(run)]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("elastic-train: expected files of a run that can be read, found: ")
    assert sentence in server.said


def test_who_can_read_it_is_told_where_others_than_this_machine_can(run, serve):
    assert "can read it" not in serve(run).said
    assert serve(run, "--listen", "0.0.0.0:0").said.endswith("; who reaches this address can read it\n")


def test_it_listens_at_the_loopback_address_unless_told_otherwise():
    parser = command_parser()[1]["serve"]
    assert str(parser.parse_args(["runs/x"]).listen) == "127.0.0.1:8080"
    assert parser.parse_args(["runs/x", "--listen", "[::1]:0"]).listen.port == 0


def test_browsers_that_go_away_in_the_middle_are_harmless(run, serve):
    """One sends half a request, and one resets the connection instead of reading its answer."""
    server = serve(run)
    half = socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S)
    half.sendall(b"GET / HT")
    for _ in range(5):
        gone = socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        gone.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        gone.close()

    assert server.ask()[0] == 200
    half.close()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(LIMIT_S) == 0
    assert server.process.stdout.read() == ""


def test_of_more_connections_than_there_is_room_for_the_oldest_are_cut_off(run, serve):
    """Each of them sends the beginning of a request and then nothing, and shuts out nobody."""
    server = serve(run)
    waiting = [socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) for _ in range(40)]
    for each in waiting:
        each.sendall(b"GET / HT")
    assert waiting[0].recv(1) == b""
    assert server.ask()[0] == 200
    assert select.select([waiting[-1]], [], [], 0)[0] == []
    for each in waiting:
        each.close()


def test_a_page_that_is_open_shows_new_steps_and_says_when_the_server_is_gone(run, serve, chromium, tmp_path):
    server = serve(run)
    page = chromium.open(f"http://127.0.0.1:{server.port}/")
    headline = "document.getElementById('headline').textContent"
    assert page.evaluate(headline).startswith("Finished: 120 steps")
    page.evaluate("page.timelines[0].show({ from: 1, to: 5 })")
    y = page.evaluate("(scrollTo(0, 1e9), scrollY)")

    longer = drawn_runs.write(tmp_path / "longer", *drawn_runs.of_generations(3, 50))
    for name in ("events/all.jsonl", "metrics.jsonl"):
        (longer / name).replace(run / name)
    assert page.wait(f"{headline}.startsWith('Finished: 150 steps')")
    assert page.evaluate("page.views[0]") == {"from": 1, "to": 5}
    assert page.evaluate("scrollY") == y > 500
    assert page.complaints() == []

    server.process.kill()
    notice = "document.getElementById('notice')"
    assert page.wait(f"!{notice}.hidden && {notice}.textContent") == (
        "Not up to date: elastic-train serve does not answer; start it again"
    )
    page.close()


def put(run, other):
    """The files of another run, in place of those of this one."""
    for name in ("events/all.jsonl", "metrics.jsonl"):
        (other / name).replace(run / name)


def test_the_keys_stay_where_they_are_when_the_page_is_drawn_again(run, serve, chromium, tmp_path):
    page = chromium.open(f"http://127.0.0.1:{serve(run).port}/")
    page.evaluate("page.timelines[0].show({ from: 1, to: 5 })")
    page.evaluate("document.querySelector('button.reset').focus()")

    put(run, drawn_runs.write(tmp_path / "longer", *drawn_runs.of_generations(3, 50)))
    assert page.wait("document.getElementById('headline').textContent.startsWith('Finished: 150 steps')")
    assert page.evaluate("document.activeElement.className") == "reset"
    page.close()


def test_another_run_that_began_in_the_same_folder_is_shown_whole(run, serve, chromium, tmp_path):
    """As `--fresh` does it. What the reader had zoomed to is a part of the run that was."""
    page = chromium.open(f"http://127.0.0.1:{serve(run).port}/")
    page.evaluate("page.timelines[0].show({ from: 1, to: 5 })")
    page.evaluate("page.zoomed({ from: 20, to: 30 })")

    events, lines = drawn_runs.of_generations(2, 20)
    later = [replace(each, time=each.time + 9000) for each in events]
    lines = [replace(each, time=each.time + 9000) for each in lines]
    put(run, drawn_runs.write(tmp_path / "fresh", later, lines))
    assert page.wait("document.getElementById('headline').textContent.startsWith('Finished: 40 steps')")
    assert page.evaluate("[page.views, page.zoom]") == [[], None]
    assert page.evaluate("page.charts[0].plot.scales.x.max") == 40
    page.close()


def test_a_run_that_was_removed_gets_one_sentence(run, serve, chromium):
    page = chromium.open(f"http://127.0.0.1:{serve(run).port}/")
    run.rename(run.with_name("aside"))

    notice = "document.getElementById('notice')"
    said = page.wait(f"!{notice}.hidden && {notice}.textContent")
    assert said.startswith("Not up to date: expected a run directory, found no run in ")
    assert said.count("expected") == said.count("found") == 1
    page.close()


# How often a run is read.


class Counted:
    def __init__(self, run, clock, cost_s):
        self.run, self.clock, self.cost_s, self.count = run, clock, cost_s, 0

    def __call__(self):
        self.count += 1
        self.clock.now += self.cost_s
        return draw(RunDir.parse(str(self.run)))


def test_a_run_is_read_for_a_two_hundredth_of_the_time(run):
    clock = FakeClock()
    reads = Counted(run, clock, cost_s=0.1)
    live = LivePicture(reads, clock, is_remote=False, place=lambda: "the same")

    first = live.newest()
    clock.now += 19.9
    assert live.newest() is first
    assert reads.count == 1
    clock.now += 0.2
    assert live.newest() is first  # nothing has changed
    assert reads.count == 2


def test_a_run_that_was_begun_anew_is_read_at_once(run):
    """`--fresh` has set the old one aside, which would be shown for up to a minute."""
    clock = FakeClock()
    reads = Counted(run, clock, cost_s=0.1)
    live = LivePicture(reads, clock, is_remote=False, place=partial(folder_id, run))
    first = live.newest()
    run.rename(run.with_name("aside"))
    (run / "events").mkdir(parents=True)

    assert live.newest() is not first
    assert live.newest().picture.timeline is None
    assert reads.count == 2


def test_a_run_that_can_no_longer_be_read_says_so_until_it_can(run):
    clock = FakeClock()
    live = LivePicture(Counted(run, clock, cost_s=0.0), clock, is_remote=False, place=lambda: "the same")
    live.newest()
    aside = run.rename(run.with_name("aside"))
    run.write_text("no folder")
    clock.now += live_picture._PAUSE_S

    for _ in range(2):
        with pytest.raises(NotNow, match="expected files of a run that can be read"):
            live.newest()
    run.unlink()
    aside.rename(run)
    clock.now += live_picture._PAUSE_S
    assert live.newest().tag
