"""A preemption notice leads to a drain that loses nothing, and its command ends with the agent."""

import signal
import time
from pathlib import Path

import pytest
from metadata_servers import HANG, SERVERS

from elastic.agent import preemption_notice
from elastic.agent.clouds.services import CLOUDS
from elastic.agent.preemption_notice import COMMAND_S, NOTICE_EVERY_S, command_notices, open_notices
from elastic.system.clock import SystemClock
from elastic.testing.fakes import FakeClock

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture
def serve():
    servers = []

    def begin(cloud):
        servers.append(SERVERS[cloud]())
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def where(cloud, server):
    """The environment of an agent that asks this server, and never the proxy."""
    address = server.address if cloud == "gcp" else server.url
    return {CLOUDS[cloud].variable: address, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}


def until(condition):
    deadline = time.monotonic() + 60.0
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def outcome(notices):
    """Whether the running command is a notice."""
    deadline = time.monotonic() + 60.0
    while (came := next(notices)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return came


def runs(pid):
    """False for a zombie too: the first process of a container may never reap orphans."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_notice_in_a_file_drains_and_the_same_command_resumes_without_a_step_lost(drill, undisturbed):
    """The file appears while the worker is held before step 10.

    A command that never answers runs meanwhile, and must be gone with its agent.
    """
    notice = drill.folder / "going-away"
    options = ["--notice-file", str(notice), "--notice-command", "sleep 10000"]
    drill.shut(10)
    agent = drill.start(*options)
    drill.stands(10, ranks=1)
    notice.touch()
    asked = drill.happens("drain_requested")
    assert asked["reason"] == f"a notice ({notice}) asks this node to leave"
    drill.open(10)
    agent.ends_with(75)
    assert drill.last_step == 10
    drill.all_are_gone()

    notice.unlink()
    drill.start(*options).ends_with(0)
    (resumed,) = drill.events("restored", generation=2)
    assert (resumed["step"], resumed["lost_steps"]) == (10, 0)
    drill.is_like(undisturbed)


@pytest.mark.parametrize(
    ("cloud", "what"),
    [
        ("aws", "AWS (terminate at 2031-09-18T08:22:00Z)"),
        ("gcp", "Google Cloud (preempted)"),
        ("azure", "Azure (Preempt, not before Mon, 19 Sep 2031 18:29:47 GMT)"),
    ],
)
def test_a_notice_of_a_cloud_drains_and_the_same_command_resumes(cloud, what, drill, serve, undisturbed):
    """Its service first answers with an error, and there is a proxy that reaches nothing."""
    server = serve(cloud)
    server.faults.append(503)
    drill.shut(10)
    agent = drill.start("--notice", cloud, env=where(cloud, server))
    drill.stands(10, ranks=1)
    drill.waits_for(lambda: "answers now" in agent.output, "an answer without a notice")
    assert drill.events("drain_requested") == []
    server.take_away()
    asked = drill.happens("drain_requested")
    assert asked["reason"] == f"a notice of {what} asks this node to leave"
    drill.open(10)
    agent.ends_with(75)
    assert drill.last_step == 10

    other = serve(cloud)
    drill.start("--notice", cloud, env=where(cloud, other)).ends_with(0)
    (resumed,) = drill.events("restored", generation=2)
    assert (resumed["step"], resumed["lost_steps"]) == (10, 0)
    drill.is_like(undisturbed)


def test_a_service_that_hangs_or_is_not_there_changes_nothing(drill, serve, undisturbed):
    """First its request for the events is held, and the end of the node does not wait for it; then
    nothing listens at its address.
    """
    server = serve("azure")
    server.faults.append(HANG)
    drill.shut(10)
    agent = drill.start("--notice", "azure", env=where("azure", server))
    drill.stands(10, ranks=1)
    drill.waits_for(lambda: server.held == 1, "a request that is held")
    agent.signal(signal.SIGTERM)
    drill.happens("drain_requested")
    drill.open(10)
    agent.ends_with(75)
    server.close()

    last = drill.start("--notice", "azure", env=where("azure", server))
    last.ends_with(0)
    drill.is_like(undisturbed)
    assert last.output.count("does not answer; is this one of its machines?") == 1


def test_an_address_that_is_none_is_refused_before_anything_is_written(drill):
    agent = drill.start("--notice", "aws", env={CLOUDS["aws"].variable: "nowhere"})
    agent.ends_with(2)
    assert "expected http://HOST[:PORT] in AWS_EC2_METADATA_SERVICE_ENDPOINT, found 'nowhere'" in agent.output
    assert not drill.run.local.exists()


def test_a_command_is_run_every_few_seconds_until_it_exits_with_0(tmp_path):
    """A fake clock; each run of the real command leaves a line. Exit code 1 is no problem."""
    said, clock, runs, there = [], FakeClock(), tmp_path / "runs", tmp_path / "there"
    notices = command_notices(f"echo >> {runs}; test -e {there}", clock, said.append)

    def next_answer():
        clock.sleep(NOTICE_EVERY_S)
        count = len(runs.read_text()) if runs.exists() else 0
        answer = outcome(notices)
        # No further look starts it: the clock stands still.
        assert not any(next(notices) for _ in range(3))
        assert len(runs.read_text()) == count + 1
        return answer

    assert not next_answer()
    assert not next_answer()
    there.touch()
    assert next_answer()
    assert said == []


@pytest.mark.parametrize(
    ("command", "waits_s", "says"),
    [("/nowhere/at/all", 0.0, "exits with 127"), ("sleep 10000", COMMAND_S + 0.1, "longer than 10 s")],
)
def test_a_command_without_an_answer_is_no_notice_and_is_reported_once(command, waits_s, says):
    """A command that does not exist, and one that is killed after ten seconds; each three times."""
    said, clock = [], FakeClock()
    notices = command_notices(command, clock, said.append)
    for _ in range(3):
        clock.sleep(NOTICE_EVERY_S)
        assert not next(notices)
        clock.sleep(waits_s)
        assert not outcome(notices)
    assert len(said) == 1
    assert says in said[0]


def test_the_processes_of_a_command_end_with_the_agent(tmp_path):
    """It writes its own pid and its child's, and waits for ever; then the context closes.

    A process has no command line for a moment while it executes its program.
    """
    pids = tmp_path / "pids"
    command = f"sleep 10000 & echo $$ $! > {pids}; wait"
    with open_notices(None, command, None, pytest.fail, SystemClock(), pytest.fail):
        both = [int(pid) for pid in until(lambda: pids.exists() and pids.read_text().split())]
        until(lambda: all(runs(pid) for pid in both))
    until(lambda: not any(runs(pid) for pid in both))


def test_a_look_that_fails_is_said_once_and_ends_no_watching(tmp_path, monkeypatch):
    """The look at the file raises twice, and so does the first call that asks the node to leave."""
    monkeypatch.setattr(preemption_notice, "NOTICE_EVERY_S", 0.01)
    errors, said, left = [MemoryError("once"), MemoryError("twice")], [], []
    look = preemption_notice._file_notices

    def failing(file):
        yield False
        if errors:
            raise errors.pop(0)
        yield from look(file)

    def leave(reason):
        left.append(reason)
        if len(left) == 1:
            raise RuntimeError("not yet")

    monkeypatch.setattr(preemption_notice, "_file_notices", failing)
    file = tmp_path / "notice"
    file.touch()
    with open_notices(str(file), None, None, leave, SystemClock(), said.append):
        until(lambda: len(left) == 2)
    assert left == [f"a notice ({file}) asks this node to leave"] * 2
    assert said == [f"the look for a notice ({file}) failed (MemoryError('once')); it is tried again"]
