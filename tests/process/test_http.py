"""What a scrape of `--http` reads as a run recovers, and the queries of the dashboard."""

import json
import os
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.process
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "elastic-train.json"


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


def scraped(where: str) -> dict[tuple[str, ...], float]:
    """By the name of the series, and the values of its own labels."""
    families = text_string_to_metric_families(get(where, "/metrics")[1])
    return {
        (
            sample.name,
            *(text for name, text in sample.labels.items() if name not in ("run", "node")),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_scrape_sees_a_recovery_from_a_killed_worker(drill):
    """The worker of rank 1 is killed at step 12, and step 16 holds the run until it is seen."""
    drill.shut(12, 16)
    agent = drill.start("--nproc-per-node", "2", "--http", "127.0.0.1:0")
    where = address(drill, agent)
    assert get(where, "/healthz")[0] == 200
    drill.stands(12, ranks=2)
    drill.waits_for(lambda: scraped(where).get(("elastic_steps_total",)) == 11, "the steps before")
    assert scraped(where)["elastic_recoveries_total", "failure"] == 0
    os.kill(drill.pid_of_rank(1, generation=1), signal.SIGKILL)
    drill.happens("worker_started", generation=2)
    drill.open(12)
    drill.stands(16, ranks=2)
    drill.waits_for(lambda: scraped(where).get(("elastic_steps_total",)) == 15, "the steps")

    (recovery,) = drill.inspects("report", drill.run.url)[1]["recoveries"]
    found = drill.waits_for(
        lambda: (now := scraped(where)).get(("elastic_recoveries_total", "failure")) == 1 and now,
        "the recovery",
    )
    phases = [
        value for key, value in found.items() if key[0] == "elastic_recovery_phase_duration_seconds_sum"
    ]
    assert sum(phases) == pytest.approx(recovery["total_s"])
    expected = {
        ("elastic_recovery_duration_seconds_sum", "failure"): recovery["total_s"],
        ("elastic_step_duration_seconds_count",): 15,
        ("elastic_world_size",): 2,
        ("elastic_generation",): 2,
        ("elastic_agent_in_generation",): 1,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert found["elastic_badput_seconds", "failure"] > 0
    # It only grows where the loop does not say that it turns.
    drill.waits_for(lambda: scraped(where)["elastic_agent_loop_age_seconds",] < 5, "a loop that turns")
    assert get(where, "/readyz") == (200, "ok: generation 2\n")
    drill.waits_for(lambda: ("elastic_checkpoint_step",) in scraped(where), "a checkpoint")
    names = {key[0] for key in scraped(where)}
    queries = [
        target["expr"] for panel in panels(json.loads(DASHBOARD.read_text())) for target in panel["targets"]
    ]
    assert len(queries) >= 10
    for query in queries:
        used = set(re.findall(r"\b(?:elastic|process)_\w+", query))
        assert used and used <= names, query
    drill.open(16)
    agent.ends_with(0)


def panels(dashboard: dict) -> list[dict]:
    nested = [each for panel in dashboard["panels"] for each in panel.get("panels", [])]
    return [panel for panel in [*dashboard["panels"], *nested] if "targets" in panel]
