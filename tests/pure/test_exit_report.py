"""The last line of a node that leaves says which step is where, and what becomes of the run."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from elastic.agent import agent as agent_module
from elastic.agent import exit_report
from elastic.agent.agent import NodeAgent
from elastic.agent.exit_report import report_exit
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.config.run_dir import RunDir
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group import RunEnd
from elastic.system.leave_deadline import LeavePage
from elastic.testing.fakes import FakeClock

BEFORE = {"others_go_on": True, "has_trained": False}


@pytest.mark.parametrize(
    ("saved_step", "agent", "code", "text"),
    [
        (9, {"others_go_on": True}, 75, "; step 9 is saved in"),
        (8, {}, 1, " after step 9, but step 8 is the newest that is saved; the same command"),
        # Its peers died with the newest state, and it waited for others in vain.
        (8, {"gave_up": True}, 75, " after step 9, but step 8 is the newest that is saved; the same"),
        (7, {"gave_up": True}, 1, " after step 9, but step 7 is the newest that is saved; the same"),
        # The state that this node had restored may have been the only one.
        (8, {"has_trained": False}, 1, " after step 9, but step 8 is the newest that is saved; the same"),
        (8, {"others_go_on": True}, 1, " after step 9, but step 8 is the newest that is saved; the other"),
        (8, BEFORE, 75, " after step 9, but step 8 is the newest that is saved; the other nodes go on"),
    ],
)
def test_a_leaving_node_says_whether_others_have_its_steps(
    saved_step, agent, code, text, capsys, monkeypatch
):
    """Step 9 is the last that it knows of, and it has step 8 in memory."""
    saved = SimpleNamespace(step=saved_step)
    monkeypatch.setattr(exit_report, "newest_checkpoint", lambda _parts, **_: saved)
    parts = SimpleNamespace(
        settings=SimpleNamespace(imports_library=True, run=RunDir.parse("run")),
        difference="",
        log=SimpleNamespace(record=lambda event: None),
        shutdown=ShutdownRequest(LeavePage(30.0), FakeClock()),
        memory=SimpleNamespace(newest=SimpleNamespace(info=SimpleNamespace(step=8))),
    )
    known = {"others_go_on": False, "has_trained": True, "gave_up": False} | agent
    end = RunEnd(exit_code=75, reason="SIGTERM")
    agent = SimpleNamespace(end=end, last_step=9, generation=2, **known)
    assert report_exit(agent, parts) == code
    assert capsys.readouterr().err.startswith(f"interrupted (SIGTERM){text}")


def test_a_node_that_gives_up_stops_its_workers_before_it_leaves(monkeypatch):
    """Their votes may agree on a newer state than the last one that counts, which is then saved."""
    called = []
    monkeypatch.setattr(agent_module, "leave_group", lambda *_, **__: called.append("leaves"))
    monkeypatch.setattr(agent_module, "has_recorded_end", lambda _run: False)
    join = Mock(side_effect=BackendFailed("no route"))
    settings = SimpleNamespace(run=None)
    parts = SimpleNamespace(group=SimpleNamespace(join=join), settings=settings)
    node = SimpleNamespace(_parts=parts, last_step=3, _stop_workers=lambda: called.append("stops"))
    node._wait_for_others = None
    assert NodeAgent._join_and_train(node) == RunEnd(exit_code=75, reason="no route") and node.gave_up
    assert called == ["stops", "leaves"]
