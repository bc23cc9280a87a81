"""`--http` against a real Prometheus."""

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_server import Prometheus, unpack

pytestmark = pytest.mark.process
STEPS = 24  # of the recipe
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "elastic-train.json"


@pytest.fixture(scope="session")
def programs(once: Callable[..., Path]) -> Path:
    """Raises NotAvailable: a machine without it fails here with a sentence."""
    folder = once("prometheus", lambda folder: (folder / "programs").symlink_to(unpack(folder)))
    return folder / "programs"


@pytest.fixture
def prometheus(programs: Path, tmp_path: Path) -> Iterator[Callable[..., Prometheus]]:
    made: list[Prometheus] = []

    def start(*targets: str) -> Prometheus:
        made.append(Prometheus(programs, tmp_path / f"prometheus-{len(made)}", [*targets]))
        return made[-1]

    yield start
    for each in made:
        each.close()


def address(drill, agent) -> str:
    """HOST:PORT at which the agent serves."""
    pattern = re.compile(r"metrics of this agent: http://(\S+)/metrics")
    return drill.waits_for(lambda: pattern.search(agent.output), "the address of --http")[1]


def get(where: str, page: str, timeout: float = 30) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{where}{page}", timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_prometheus_sees_a_recovery_from_a_killed_worker(drill, prometheus):
    """The worker of rank 1 is killed at step 12, and step 16 holds the run until it is seen."""
    drill.shut(12, 16)
    agent = drill.start("--nproc-per-node", "2", "--http", "127.0.0.1:0")
    where = address(drill, agent)
    assert get(where, "/healthz")[0] == 200
    server = prometheus(where)
    drill.stands(12, ranks=2)
    drill.waits_for(lambda: server.value("elastic_steps_total") == 11, "the steps before")
    drill.waits_for(lambda: server.value('elastic_recoveries_total{cause="failure"}') == 0, "no recovery")
    os.kill(drill.pid_of_rank(1, generation=1), signal.SIGKILL)
    drill.happens("worker_started", generation=2)
    drill.open(12)
    drill.stands(16, ranks=2)

    recoveries = 'max by (run) (elastic_recoveries_total{cause="failure"})'
    drill.waits_for(lambda: server.value(recoveries) == 1, "the recovery")
    drill.waits_for(lambda: server.value("max by (run) (elastic_steps_total)") == 15, "the steps")

    (recovery,) = drill.inspects("report", drill.run.url)[1]["recoveries"]
    phases = 'sum by (run) (elastic_recovery_phase_duration_seconds_sum{cause="failure"})'
    for query, value in {
        'elastic_recovery_duration_seconds_sum{cause="failure"}': recovery["total_s"],
        phases: recovery["total_s"],
        "elastic_step_duration_seconds_count": 15,
        "elastic_world_size": 2,
        "elastic_generation": 2,
        "elastic_agent_in_generation": 1,
        "elastic_badput_seconds{kind='failure'} > bool 0": 1,
        "process_open_fds > bool 0": 1,
    }.items():
        # Where the machine is busy, a scrape may have come too late, and all series are gone for a
        # second.
        found = drill.waits_for(lambda asked=query: server.value(asked), query)
        assert found == pytest.approx(value), query
    # It only grows where the loop does not say that it turns.
    drill.waits_for(
        lambda: server.value("elastic_agent_loop_age_seconds < 5") is not None, "a loop that turns"
    )
    assert get(where, "/readyz") == (200, "ok: generation 2\n")
    assert server.problems(get(where, "/metrics")[1].encode()) == ""
    queries_name_series_that_exist(drill, server)
    drill.open(16)
    agent.ends_with(0)


def queries_name_series_that_exist(drill, server):
    """Prometheus itself reads each query of the dashboard."""
    drill.waits_for(lambda: server.value("elastic_checkpoint_step") is not None, "a checkpoint")
    everything = '{job="elastic"}'
    drill.waits_for(lambda: len(server.ask(everything)) > 100, "all series")
    names = {each["metric"]["__name__"] for each in server.ask(everything)}
    queries = [
        target["expr"] for panel in panels(json.loads(DASHBOARD.read_text())) for target in panel["targets"]
    ]
    assert len(queries) >= 10
    for query in queries:
        used = set(re.findall(r"\b(?:elastic|process)_\w+", query))
        assert used and used <= names, query
        server.ask(query.replace("$run", ".*").replace("$__rate_interval", "1m").replace("$__range", "5m"))


def panels(dashboard: dict) -> list[dict]:
    nested = [each for panel in dashboard["panels"] for each in panel.get("panels", [])]
    return [panel for panel in [*dashboard["panels"], *nested] if "targets" in panel]
