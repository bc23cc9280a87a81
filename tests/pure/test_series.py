"""The series that an agent exports are those of docs/metrics.md, and follow Prometheus' rules."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from logged import logged
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from watched import agent

from elastic.config.run_dir import RunDir
from elastic.monitoring import run_series
from elastic.monitoring.followed_run import FollowedRun
from elastic.monitoring.http_monitor import _agent_families
from elastic.monitoring.run_families import CAUSES, run_families
from elastic.monitoring.run_series import RunSeries
from elastic.monitoring.run_totals import RunTotals
from elastic.observe.log import EventLog
from elastic.observe.metrics import Metrics
from elastic.observe.slow_ranks import SlowRank
from elastic.observe.step_line import StepLine
from elastic.rendezvous import transitions
from elastic.testing.fakes import FakeClock

LABELS = {"run": "r", "node": "a"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture
def run(tmp_path):
    """A run that was recovered once and saved."""
    run = RunDir.parse(str(tmp_path / "run"))
    write(run, "generation_started", 1, 100.0, cause="start")
    write(run, "run_started", 1, 100.5, steps=9)
    lines = Metrics(run.metrics, generation=1)
    lines.rewind(0)
    for step in (1, 2):
        lines.append(StepLine(step=step, loss=0.5, generation=1, time=100.5 + step, seconds=0.75))
    write(run, "checkpoint_committed", 1, 102.6, step=2)
    write(run, "worker_exited", 1, 103.0)
    write(run, "generation_ended", 1, 103.1)
    write(run, "generation_started", 2, 103.5, cause="failure", nodes=["a", "b"], world_size=2)
    lines = Metrics(run.metrics, generation=2)
    lines.rewind(1)
    write(run, "restored", 2, 104.0, step=1, lost_steps=1)
    for step in (2, 3):
        lines.append(StepLine(step=step, loss=None, generation=2, time=103.0 + step, seconds=0.75))
    write(run, "first_step", 2, 106.0, step=3)
    return run


def write(run, name, generation, time, node="a", **fields):
    log = EventLog(run.events / f"{node}.jsonl", node=node, clock=FakeClock())
    log._file.append(logged(name, time, generation, node=node, **fields).to_json())


def names(families):
    return {f"{each.name}{'_total' if each.type == 'counter' else ''}" for each in families}


def families_of(run):
    followed = FollowedRun(run, "a")
    for _ in followed.poll():
        pass
    return run_families(followed, labels=LABELS, about={"recipe": "train.py"}, now_s=0.0)


def value(families, name, **labels):
    (found,) = (
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and sample.labels.items() >= labels.items()
    )
    return found


def test_the_document_lists_every_series_and_no_other(run):
    documented = set(re.findall(r"^\| `(elastic_\w+)`", DOCUMENT.read_text(), re.MULTILINE))
    exported = [*families_of(run), *_agent_families(agent(run), LABELS)]

    assert {name.removesuffix("_info") for name in documented} == names(exported)
    types = dict(re.findall(r"^\| `(elastic_\w+)` \| (\w+)", DOCUMENT.read_text(), re.MULTILINE))
    for each in exported:
        documented_as = {"counter": f"{each.name}_total", "info": f"{each.name}_info"}.get(
            each.type, each.name
        )
        assert types[documented_as] == each.type


def test_series_have_the_values_of_the_run(run):
    found = families_of(run)
    assert value(found, "elastic_steps_total") == 3
    assert value(found, "elastic_lost_steps_total") == 1
    assert value(found, "elastic_step_duration_seconds_count") == 3
    assert value(found, "elastic_recoveries_total", cause="failure") == 1
    assert value(found, "elastic_recoveries_total", cause="node lost") == 0
    assert value(found, "elastic_recovery_duration_seconds_sum", cause="failure") == 3.0
    assert value(found, "elastic_recovery_duration_seconds_bucket", cause="failure", le="2.5") == 0
    assert value(found, "elastic_recovery_duration_seconds_bucket", cause="failure", le="5.0") == 1
    assert value(found, "elastic_useful_seconds") == 2.25
    assert value(found, "elastic_world_size") == value(found, "elastic_nodes") == 2
    assert value(found, "elastic_checkpoint_timestamp_seconds") == 102.6
    assert value(found, "elastic_last_step") == 9
    assert math.isnan(value(found, "elastic_loss"))


def test_restarts_in_a_row_end_with_a_new_step(run):
    write(run, "generation_started", 3, 107.0, cause="failure", restarts=2)
    assert value(families_of(run), "elastic_restarts") == 2
    write(run, "first_step", 3, 109.0, step=4)
    assert value(families_of(run), "elastic_restarts") == 0
    write(run, "generation_started", 4, 110.0, cause="failure", restarts=1)
    assert value(families_of(run), "elastic_restarts") == 1


@pytest.mark.parametrize("newest_first", [False, True])
def test_the_newest_checkpoint_may_be_of_a_step_before_one_that_did_not_load(newest_first):
    """Step 288 was damaged, and generation 2 went on from 150. Files are read in any order."""
    totals = RunTotals()
    saves = [(1, 288, 10.0), (2, 160, 20.0), (2, 200, 30.0)]
    for generation, step, time in reversed(saves) if newest_first else saves:
        event = logged("checkpoint_committed", time, generation, step=step, seconds=0.5)
        totals.add_event(event)
    assert (totals.committed.event.step, totals.committed.time) == (200, 30.0)
    assert totals.checkpoints["committed"] == 3


def test_a_slow_rank_of_the_newest_generation_has_its_share():
    """In generation 1 rank 0 was slow; in generation 2 rank 1 is, for half of the time."""
    totals = RunTotals()
    for rank, node in enumerate(["a", "b"]):
        totals.add_event(logged("worker_started", 1.0, 2, node, rank=rank, pid=7))
    for step in range(1, 201):
        generation, slow = (1, 0) if step <= 100 else (2, 1)
        paced = {"slowest_rank": slow, "slowest_s": 1.0, "others_s": 0.5}
        totals.add_line(
            StepLine(step=step, generation=generation, world_size=2, seconds=1.0, time=1.0 * step, **paced)
        )
    assert totals.slow_ranks == [SlowRank(rank=1, node="b", share=0.5)]


def test_a_scrape_tells_the_slow_node_from_the_agent_that_exports(tmp_path):
    """Rank 1, on node b, is slow; the text is read back as Prometheus reads it."""
    run = RunDir.parse(str(tmp_path / "run"))
    write(run, "generation_started", 1, 100.0, cause="start", nodes=["a", "b"], world_size=2)
    for rank, node in enumerate(["a", "b"]):
        write(run, "worker_started", 1, 100.1, node, rank=rank, pid=7)
    lines = Metrics(run.metrics, generation=1)
    lines.rewind(0)
    paced = {"world_size": 2, "slowest_rank": 1, "slowest_s": 1.0, "others_s": 0.5}
    for step in range(1, 101):
        lines.append(StepLine(step=step, generation=1, seconds=1.0, time=100.0 + step, **paced))

    found = families_of(run)
    registry = SimpleNamespace(collect=lambda: found)
    read = {each.name: each for each in text_string_to_metric_families(generate_latest(registry).decode())}

    (sample,) = read["elastic_slow_rank_ratio"].samples
    assert sample.labels == {"run": "r", "node": "a", "rank": "1", "slow_node": "b"}
    assert sample.value == 0.5


@pytest.mark.parametrize("loss", [0.5, 7, 1e100, -1e308, 10**300])
def test_a_finite_loss_is_exported_as_it_is(loss, run):
    lines = Metrics(run.metrics, generation=2)
    lines.append(StepLine(step=4, loss=loss, generation=2, time=107.0, seconds=0.75))
    assert value(families_of(run), "elastic_loss") == float(loss)


@pytest.mark.parametrize("loss", [10**400, "0.5", True, [1.0], None])
def test_what_is_no_float_is_exported_as_nan(loss, run):
    lines = Metrics(run.metrics, generation=2)
    lines.append(StepLine(step=4, loss=loss, generation=2, time=107.0, seconds=0.75))
    assert math.isnan(value(families_of(run), "elastic_loss"))


def test_events_of_generations_without_a_new_step_are_forgotten_too():
    """A run that fails again and again: no first step waits to be counted."""
    totals = RunTotals()
    for generation in range(1, 101):
        totals.add_event(logged("generation_started", 1.0 * generation, generation, cause="failure"))
        totals.add_event(logged("worker_exited", generation + 0.5, generation))
        totals.count_recoveries(lambda _: [])
    assert len(totals._signs) <= 10


def test_each_cause_of_a_generation_has_its_counter_from_the_start():
    causes = {transitions.RESUME, transitions.NODE_LOST, transitions.NODE_LEFT, transitions.NODE_JOINED}
    assert causes | {transitions.FAILURE, transitions.DIVERGED} == set(CAUSES)


@pytest.mark.parametrize(
    ("is_first", "node", "exports"), [(True, "a", True), (False, "a", False), (True, "b", False)]
)
def test_only_the_agent_that_began_the_newest_generation_exports_the_run(run, is_first, node, exports):
    """The last one was cut off, and still believes that it has rank 0."""
    series = RunSeries(agent(run, is_first=is_first, node=node), labels=LABELS, about={}, report=print)
    series.poll()
    assert bool(series.families) == exports


def test_series_vanish_where_the_files_cannot_be_read_and_come_back(run, monkeypatch):
    """Ended and not frozen: a value that stands still would look like a run that does."""
    told = []
    series = RunSeries(agent(run), labels=LABELS, about={}, report=told.append)
    series.try_poll()
    assert series.families

    with monkeypatch.context() as patch:
        patch.setattr(FollowedRun, "poll", lambda _self: 1 / 0)
        series.try_poll()
        series.try_poll()
        assert not series.families
    assert told == ["the run's series are not served: division by zero; training goes on"]
    series.try_poll()
    assert series.families


def test_a_disk_that_does_not_answer_holds_up_no_scrape(run, monkeypatch):
    """The thread that follows the run is in a read that never ends."""
    monkeypatch.setattr(run_series, "_LOCK_S", 0.0)
    series = RunSeries(agent(run), labels=LABELS, about={}, report=print)
    series.try_poll()
    assert series.families
    with series._lock:
        assert series.families == []
    assert series.families


def test_a_run_whose_files_are_still_being_read_has_no_series(run, monkeypatch):
    monkeypatch.setattr("elastic.monitoring.followed_events.READ_BYTES", 500)
    series, polls = RunSeries(agent(run), labels=LABELS, about={}, report=print), 0
    while not series.families:
        assert series.try_poll() in (0.0, run_series.CATCH_UP_POLL_S, run_series.POLL_S)
        polls += 1
        assert polls < 100
    assert polls > 2
    assert value(series.families, "elastic_steps_total") == 3
