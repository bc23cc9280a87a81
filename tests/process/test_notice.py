"""A preemption notice leads to a drain that loses nothing, and its command ends with the agent."""

import signal
import threading
import time
from pathlib import Path

import pytest
from metadata_servers import HANG, SERVERS

from elastic.agent.preemption import CLOUDS, open_notices, sources
from elastic.config.options import Options
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
        ("aws", "AWS: terminate at 2031-09-18T08:22:00Z"),
        ("gcp", "Google Cloud: preempted"),
        ("azure", "Azure: Preempt, not before Mon, 19 Sep 2031 18:29:47 GMT"),
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
    assert asked["reason"] == f"a notice ({what}) asks this node to leave"
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
    assert last.output.count("no notice of the metadata service of Azure") == 1


def notices(**options):
    return Options(recipe="r.py", run_dir="r", **options)


def test_the_processes_of_a_command_end_with_the_agent(tmp_path):
    """It writes its own pid and its child's, and waits for ever; then the context closes.

    A process has no command line for a moment while it executes its program.
    """
    pids = tmp_path / "pids"
    options = notices(notice_command=f"sleep 10000 & echo $$ $! > {pids}; wait")
    with open_notices(options, {}, pytest.fail, pytest.fail, SystemClock()):
        both = [int(pid) for pid in until(lambda: pids.exists() and pids.read_text().split())]
        until(lambda: all(runs(pid) for pid in both))
    until(lambda: not any(runs(pid) for pid in both))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("true", "true"),
        ("false", None),
        ("/nowhere/at/all", "exits with 127"),
        ("sleep 10000", "longer than 10 s"),
    ],
)
def test_a_command_is_a_notice_where_it_exits_with_0(command, says):
    """One that does not exist, and one that runs for too long, give no answer."""
    clock, is_over = FakeClock(), threading.Event()
    clock.monotonic = lambda: clock.sleep(4.0) or clock.now
    (source,) = sources(notices(notice_command=command), {}, is_over, clock)
    if command.startswith(("/", "sleep")):
        with pytest.raises((OSError, ValueError), match=says):
            source.ask()
    else:
        assert source.ask() == says
