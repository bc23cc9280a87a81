"""An agent reads the errors that its workers left, and leaves out files that are damaged. The line
of the user's own code is found in the traceback of any error.
"""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elastic.agent.decide import WorkerExit
from elastic.agent.workers import first_failure
from elastic.divergence import Divergence
from elastic.errors import EXIT_FAILED, PeerLost
from elastic.reduce.exchange import peers_may_die
from elastic.system.untrusted import decode
from elastic.system.worker_protocol import QUOTED, WorkerError, read_errors, write_error
from elastic.worker import main, script_end
from elastic.worker.main import of_victim, report_error


def test_errors_are_read_back_damaged_files_left_out(tmp_path):
    """Rank 0 raised with text that is no valid UTF-8, and votes of up to 63 bits; rank 1 left
    half a file, and rank 2 none.
    """
    found = Divergence(generation=2, step=9, agreed=8, entry="m.w", votes=(2**63 - 1, 0), nodes=("a", "b"))
    said = {"message": "not \udcff text", "traceback": "line 1\nline 2"}
    error = WorkerError(rank=0, **said, time=12.5, divergence=found)
    write_error(tmp_path, error)
    (tmp_path / "rank1.json").write_text('{"rank": 1, "mess')

    assert read_errors(tmp_path, [0, 1, 2]) == [error]


def test_which_worker_failed_first_needs_no_wall_clock(tmp_path, monkeypatch):
    """The clock goes a day back between the errors of two workers of a node."""

    def failed(rank, message):
        agent = SimpleNamespace(error_folder=str(tmp_path))
        monkeypatch.setattr(main, "_assigned", [SimpleNamespace(agent=agent, rank=rank)])
        report_error(ValueError(message))

    failed(1, "first")
    now = time.time()
    monkeypatch.setattr("elastic.system.clock.SystemClock.wall", staticmethod(lambda: now - 86400.0))
    failed(0, "second")

    exits = [WorkerExit(rank=rank, code=EXIT_FAILED) for rank in (0, 1)]
    assert first_failure(exits, set(), read_errors(tmp_path, [0, 1]), "reason").rank == 1


WORDS = "[pair.cc:545] Read error: Connection reset by peer\nGLHF!"


def test_a_victim_says_one_sentence_and_marks_its_collective():
    """gloo's words (`Connection reset`, `GLHF!`) are in the log, and not on the console."""
    with pytest.raises(PeerLost) as raised, peers_may_die("the sum"):
        raise RuntimeError(WORDS)
    with pytest.raises(KeyError), peers_may_die("the sum"):
        raise KeyError("an own bug stays one")
    sentence, *quoted = of_victim(raised.value).splitlines()
    assert sentence.startswith("another worker went away during the sum: this worker is a victim")
    assert quoted == [f"{QUOTED}{line}" for line in WORDS.splitlines()]


def test_the_users_innermost_line_is_found_among_libraries():
    """The library calls a function of the recipe through torch, and refuses what it does."""

    def refuse():
        decode(int, "no number", what="a number")

    module = torch.nn.Module()
    module.forward = refuse
    try:
        module()
    except ValueError as error:
        found = script_end.own_line(error.__traceback__)
    line = refuse.__code__.co_firstlineno + 1
    assert found == f'  at {__file__}:{line}: decode(int, "no number", what="a number")'


def test_a_process_group_of_the_users_is_known_by_its_traceback(monkeypatch):
    """torch says only which variable it lacks. One that this library opens is no mistake of the
    recipe's, nor is an error that comes from somewhere else.
    """
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK") as raised:
        torch.distributed.init_process_group("gloo")
    assert script_end.opens_group(raised.tb)
    monkeypatch.setattr("elastic.worker.preload._INSTALLED", (str(Path(__file__).parent),))
    assert not script_end.opens_group(raised.tb)
    with pytest.raises(ZeroDivisionError) as raised:
        1 / 0  # noqa: B018
    assert not script_end.opens_group(raised.tb)
