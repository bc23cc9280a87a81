"""What an agent makes of a rendezvous backend that answers or does not."""

from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest

from elastic.agent import group_client
from elastic.agent.group_client import GroupClient
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.config.options import Options
from elastic.errors import RendezvousTimeout
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group import Group, Node, RunEnd
from elastic.rendezvous.rendezvous import Generation, GroupView
from elastic.rendezvous.transitions import NODE_JOINED, NODE_LEFT, NODE_LOST
from elastic.system.leave_deadline import LeavePage
from elastic.testing.fakes import FakeClock

TIMEOUT_S = 600.0
OPTIONS = Options(recipe="r.py", run_dir="r", max_nodes=3)
A, B, C = (Node(id=name, address=name, nproc=1) for name in "abc")
WATCH = GroupView(open=True, fenced=False, newcomers=(C,), lost=(), ended=None, cause="start", failure=None)


class Rendezvous:
    """Answers as long as it is `up`."""

    def __init__(self):
        self.up = True
        self.done = self.leave = self.close = self.end = self._answer_with(Group())
        self.watch = self._answer_with(WATCH)

    def _answer_with(self, value):
        def answer(*_words, **_more):
            if not self.up:
                raise BackendFailed("no route")
            return value

        return answer


@pytest.fixture
def there(monkeypatch):
    monkeypatch.setattr(group_client, "ANSWER_S", 60.0)  # however busy the machine is
    rendezvous, clock, said = Rendezvous(), FakeClock(), []
    shutdown = ShutdownRequest(LeavePage(30.0), clock)
    return rendezvous, clock, said, GroupClient(rendezvous, OPTIONS, said.append, shutdown, clock)


def generation(members, *, cause, rank=0):
    group = Group(generation=2, open=True, members=members, endpoint="a:1", cause=cause)
    return Generation.of(group, members[rank])


def test_an_outage_and_its_end_are_reported_once(there):
    rendezvous, _, said, group = there
    for up in (True, False, False, True, True):
        rendezvous.up = up
        assert group.poll(step=1, is_idle=False) is (WATCH if up else None)
    assert said == [
        "the rendezvous did not answer (no route); training goes on",
        "the rendezvous answers again",
    ]


def test_only_an_idle_node_gives_up_on_a_backend(there):
    """It counts from the last answer. A report that the backend does not take is no error."""
    rendezvous, clock, _, group = there
    clock.sleep(TIMEOUT_S)
    group.poll(step=1, is_idle=True)
    assert group.close("failure", step=1, counts=True, failure=None) == Group()
    rendezvous.up = False
    clock.sleep(TIMEOUT_S - 1)
    assert group.poll(step=1, is_idle=True) is None
    assert group.close("failure", step=1, counts=True, failure=None) is None
    group.leave()
    assert not group.end(RunEnd(exit_code=1, reason="it raised"))
    clock.sleep(1)
    assert not group.report_done()
    assert group.poll(step=1, is_idle=False) is None
    with pytest.raises(BackendFailed):
        group.poll(step=1, is_idle=True)


def test_a_call_that_hangs_holds_up_an_idle_node_for_no_longer(there, monkeypatch):
    """From then on nothing is asked of the backend any more."""
    monkeypatch.setattr(group_client, "ANSWER_S", 0.01)
    rendezvous, clock, _, group = there
    asked, answers = [], Event()
    rendezvous.watch = lambda **_: asked.append(1) or answers.wait()
    assert group.poll(step=1, is_idle=True) is None
    clock.sleep(TIMEOUT_S)
    assert group.poll(step=1, is_idle=False) is None
    with pytest.raises(BackendFailed):
        group.poll(step=1, is_idle=True)
    assert not group.report_done() and asked == [1]
    answers.set()


def test_the_group_is_told_of_each_newer_commit_until_it_knows(there):
    """With the next poll, the report that the workers are done, or the last call."""
    rendezvous, _, _, group = there
    told = []

    def report_commit(step):
        if not rendezvous.up:
            raise BackendFailed("no route")
        told.append(step)

    rendezvous.report_commit = report_commit
    calls = [lambda: group.poll(step=1, is_idle=False), group.report_done, group.leave]
    for call, step, rendezvous.up in zip(calls * 2, (4, 4, 2, 4, 8, 9), (0, 1, 1, 1, 1, 1), strict=True):
        group.note_commit(step)
        call()
    assert told == [4, 8, 9]


@pytest.mark.parametrize(
    ("after", "cause", "left"),
    [
        ((A,), NODE_LEFT, True),
        ((A,), NODE_LOST, False),
        ((A, C), NODE_JOINED, True),  # a node left in the same drain
        ((A, B), NODE_JOINED, False),
    ],
)
def test_a_planned_leave_is_told_from_a_lost_node(there, after, cause, left):
    *_, group = there
    assert not group.enter(generation((A, B), cause="start"))
    assert group.enter(generation(after, cause=cause)) is left


def test_the_agent_of_rank_0_alone_admits_who_waits(there):
    *_, group = there
    assert not group.is_first
    group.enter(generation((A, B), cause="start", rank=1))
    assert not group.admits(WATCH)
    group.enter(generation((A, B), cause="failure", rank=0))
    assert group.admits(WATCH)


@pytest.mark.parametrize(
    ("arrivals_s", "window_s", "max_nodes", "admitted_s"),
    [
        ([0.0, 0.3, 0.7], 0.5, 9, 0.5),  # one drain for the first two
        ([0.0, 0.3, 0.9], 0.0, 9, 0.0),
        ([0.0], 0.5, 3, 0.0),  # the last one that fits: nothing could come in its window
        ([0.0, 0.1], 0.5, 4, 0.1),
    ],
)
def test_nodes_that_come_together_are_let_in_together(there, arrivals_s, window_s, max_nodes, admitted_s):
    """Looked at forty times a second. A node that stopped waiting begins again."""
    rendezvous, clock, _, group = there
    group.options = replace(OPTIONS, join_window_s=window_s, max_nodes=max_nodes)
    group.enter(generation((A, B), cause="start"))

    def admits(now_s, come):
        clock.now = now_s
        view = replace(WATCH, newcomers=tuple(replace(C, id=f"new{at_s}") for at_s in come))
        rendezvous.watch = lambda **_: view
        assert group.poll(step=1, is_idle=False) is view
        return group.admits(view)

    admits(-9.0, arrivals_s[:1])
    assert not admits(-8.0, [])
    ticks = (tick / 40 for tick in range(1000))
    assert next(at for at in ticks if admits(at, [each for each in arrivals_s if each <= at])) == admitted_s


@pytest.mark.parametrize(
    ("answers", "is_open", "entered"),
    [
        ([TimeoutError("lost"), None], True, 0),
        # It is reached: its worker has ended, which its own agent reports.
        ([TimeoutError("lost"), ConnectionRefusedError("refused")], True, 0),
        # The node that serves its store died; another one has found that.
        ([TimeoutError("timed out"), None], False, 1),
        ([], True, None),
    ],
)
def test_a_node_enters_where_the_machine_of_the_store_answers(there, answers, is_open, entered, monkeypatch):
    """Another node serves the store; where it is never reached, this one gives up."""
    rendezvous, clock, _, client = there
    joined, left, began_s = [], list(answers), clock.now

    def join(_interrupted):
        joined.append(generation((A, B), cause=NODE_LOST, rank=1))
        return joined[-1]

    def connect(_where, timeout):
        if (answer := left.pop(0) if left else TimeoutError("timed out")) is not None:
            raise answer
        return SimpleNamespace(close=lambda: None)

    rendezvous.join, rendezvous.watch = join, lambda: replace(WATCH, open=is_open)
    monkeypatch.setattr(group_client.socket, "create_connection", connect)
    if entered is not None:
        assert client.join(lambda: False, meanwhile=lambda: None) is joined[entered]
        return
    with pytest.raises(RendezvousTimeout, match=r"store of generation 2 at a:1 .* within 10 s.*timed out"):
        client.join(lambda: False, meanwhile=lambda: None)
    assert 10 <= clock.now - began_s < 11 and len(joined) == 1
