"""The series that an agent exports are those of docs/metrics.md, and follow Prometheus' rules."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import logged, record
from viewed import viewed
from watched import agent

from elastic.config.options import ListenAddress
from elastic.config.run_dir import RunDir
from elastic.observe.metrics import Metrics
from elastic.observe.reader import RunReader, read_run
from elastic.observe.run_view import view_of
from elastic.observe.step_line import StepLine
from elastic.rendezvous import transitions
from elastic.report.agent_pages import CAUSES, AgentPages, RunSeries, agent_figures, family

LABELS = {"run": "r", "node": "a"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "elastic-train.json"


def write_lines(run, generation, time_of, **values):
    lines = Metrics(run.metrics, generation=generation)
    lines.rewind(min(time_of) - 1)
    for step, time in time_of.items():
        lines.append(StepLine(step=step, generation=generation, time=time, seconds=0.75, **values))


@pytest.fixture
def run(tmp_path):
    """A run that was recovered once and saved."""
    run = RunDir.parse(str(tmp_path / "run"))
    record(run, "generation_started", 1, 100.0, cause="start")
    record(run, "run_started", 1, 100.5, steps=9)
    write_lines(run, 1, {1: 101.5, 2: 102.5}, loss=0.5)
    record(run, "checkpoint_committed", 1, 102.6, step=2)
    record(run, "worker_exited", 1, 103.0)
    record(run, "generation_ended", 1, 103.1)
    record(run, "generation_started", 2, 103.5, cause="failure", nodes=["a", "b"], world_size=2)
    record(run, "restored", 2, 104.0, step=1, lost_steps=1)
    write_lines(run, 2, {2: 105.0, 3: 106.0}, loss=None)
    record(run, "first_step", 2, 106.0, step=3)
    record(run, "rehearsed", 2, 106.5, step=3, verdict="alike")
    record(run, "overlapped", 2, 106.6, step=3, verdict="once")
    return run


def families_of(run):
    return RunSeries(LABELS, {"recipe": "train.py"}).families(view_of(read_run(run)))


def values_of(families):
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name not in LABELS)): sample.value
        for family in families
        for sample in family.samples
    }


def test_document_and_dashboard_know_every_series_and_no_other(run):
    types = dict(re.findall(r"^\| `(elastic_\w+)` \| (\w+)", DOCUMENT.read_text(), re.MULTILINE))
    suffixes = {"counter": "_total", "info": "_info"}
    exported = [*families_of(run), *(family(LABELS, each) for each in agent_figures(agent(run)))]
    assert {f"{each.name}{suffixes.get(each.type, '')}": each.type for each in exported} == types

    of_python = {"process_open_fds", "process_resident_memory_bytes", "process_cpu_seconds_total"}
    names = {sample.name for each in exported for sample in each.samples} | of_python
    queries = re.findall(r'"expr": "(.*)"', DASHBOARD.read_text())
    assert len(queries) >= 10
    for query in queries:
        used = set(re.findall(r"\b(?:elastic|process)_\w+", query))
        assert used and used <= names, query


def test_series_have_the_values_of_the_run(run):
    found = values_of(families_of(run))
    expected = {
        ("elastic_lost_steps_total",): 1,
        ("elastic_recoveries_total", "node lost"): 0,
        ("elastic_step_duration_seconds_count",): 2 + 1 - 1 + 1,
        ("elastic_recovery_duration_seconds_sum", "failure"): 3.0,
        ("elastic_recovery_duration_seconds_bucket", "failure", "2.5"): 0,
        ("elastic_recovery_duration_seconds_bucket", "failure", "5.0"): 1,
        ("elastic_compared_steps_total", "rehearsal", "alike"): 1,
        ("elastic_compared_steps_total", "overlap", "differed"): 1,
        ("elastic_useful_seconds",): 2.25,
        ("elastic_world_size",): 2,
        ("elastic_nodes",): 2,
        ("elastic_checkpoint_timestamp_seconds",): 102.6,
        ("elastic_last_step",): 9,
    }
    assert {key: found[key] for key in expected} == expected
    assert math.isnan(found["elastic_loss",])
    for loss, shown in ((3, "3.0"), (10**400, "nan"), ("x", "nan")):
        Metrics(run.metrics, generation=2).append(StepLine(step=4, loss=loss, generation=2, time=107.0))
        assert str(float(values_of(families_of(run))["elastic_loss",])) == shown
    record(run, "generation_started", 3, 107.0, cause="failure", restarts=2)
    assert values_of(families_of(run))["elastic_restarts",] == 2


def test_a_slow_rank_of_the_newest_generation_has_its_share():
    """In generation 1 rank 0 was slow; in generation 2 rank 1 is, for half of the time."""
    events, lines = [], []
    for generation in (1, 2):
        events.append(logged("generation_started", 100.0 * generation, generation, nodes=["a", "b"]))
        for rank, node in enumerate("ab"):
            events.append(logged("worker_started", 100.0 * generation, generation, node, rank=rank))
        own = {"slowest_rank": generation - 1, "slowest_s": 1.0, "others_s": 0.5, "seconds": 1.0}
        one = StepLine(step=0, generation=generation, world_size=2, **own)
        lines += [replace(one, step=60 * generation + n) for n in range(60)]
    found = values_of(RunSeries(LABELS, {}).families(viewed(events, lines)))
    name = "elastic_slow_rank_ratio"
    assert {key: value for key, value in found.items() if key[0] == name} == {(name, "1", "b"): 0.5}


def test_each_cause_of_a_generation_has_its_counter():
    """A counter that begins with 1 has no increase."""
    named = {value for name, value in vars(transitions).items() if name.isupper() and isinstance(value, str)}
    assert {"failure", "node lost", "node joined", "node left", "resume"} <= {*CAUSES}
    assert {each for each in named if each.startswith("node ")} <= {*CAUSES}


@pytest.fixture
def exports(run):
    """Whether a scrape of an agent with these parts has series of the run."""
    pages = AgentPages(ListenAddress(host="127.0.0.1", port=0))

    def scraped(**parts):
        if parts or pages._parts is None:
            pages.start(agent(run, **parts))
        body = pages._metrics("").body
        assert b"elastic_agent_step" in body
        return b"elastic_steps_total" in body

    yield scraped
    pages.stop()


def test_only_the_agent_of_the_newest_generation_exports_the_run(exports):
    """The last one was cut off, and still believes that it has rank 0."""
    assert exports() and not exports(is_first=False) and not exports(node="b")


def test_series_vanish_where_files_cannot_be_read_and_come_back(exports, monkeypatch):
    told = []
    assert exports(print_line=told.append)
    with monkeypatch.context() as patch:
        patch.setattr(RunReader, "read_events", lambda _self: 1 / 0)
        assert not exports() and not exports()
    assert [text.partition(";")[0] for text in told] == ["the run's series are not served (division by zero)"]
    assert exports()


@st.composite
def histories(draw):
    """Events, and (generation, step, time) of lines, in the order in which they were written."""
    now, step, highest, items = 100.0, 0, 0, []
    for generation in range(1, draw(st.integers(1, 5)) + 1):
        cause = "start" if generation == 1 else draw(st.sampled_from(CAUSES))
        node, back = draw(st.sampled_from(["a", "b"])), draw(st.integers(max(0, step - 3), step))
        items.append(logged("generation_started", now + 1, generation, node=node, cause=cause, nodes=[node]))
        lost = {"step": back, "lost_steps": highest - back}
        items.append(logged("restored", now + 2, generation, node=node, source="snapshot", **lost))
        step, now, has_new_step = back, now + 2, False
        for _ in range(draw(st.integers(0, 4))):
            step, now = step + 1, now + 1
            items.append((generation, step, now))
            if step == highest + 1 and not has_new_step:
                items.append(logged("first_step", now, generation, node=node, step=step))
                has_new_step = True
            highest = max(highest, step)
        for name in draw(st.lists(st.sampled_from(["worker_exited", "generation_ended"]), max_size=2)):
            now += 0.25
            items.append(logged(name, now, generation, node=draw(st.sampled_from(["a", "b"]))))
    return items


@settings(max_examples=40, deadline=None)
@given(histories(), st.lists(st.booleans(), min_size=80, max_size=80))
def test_totals_are_those_of_the_report_and_counters_never_fall(tmp_path_factory, items, looks):
    """Followed item by item, and read once at the end as by an agent that starts then."""
    run = RunDir.parse(str(tmp_path_factory.mktemp("run")))
    reader, series, seen, writer, generation = RunReader(run), RunSeries(LABELS, {}), [], None, 0
    for item, is_looked_at in zip(items, looks, strict=False):
        if isinstance(item, tuple):
            number, step, time = item
            writer.append(StepLine(step=step, loss=1.0, generation=number, time=time, seconds=0.75))
        else:
            if item.event.name == "restored":
                generation += 1
                writer = Metrics(run.metrics, generation=generation)
                writer.rewind(item.event.step)
            record(run, item.event.name, item.generation, item.time, item.node, **item.event.fields())
        if is_looked_at:
            seen.append(values_of(series.families(view_of(reader.read()))))
    late = view_of(read_run(run))
    seen.append(values_of(series.families(view_of(reader.read()))))
    seen.append(values_of(RunSeries(LABELS, {}).families(late)))
    reader.close()
    names = {key for found in seen for key in found if key[0].endswith(("_total", "_count", "_bucket"))}
    for before, after in pairwise(seen[:-1]):
        assert all(before.get(key, 0) <= after.get(key, 0) for key in names)
    # The lines of lost steps are gone, so that who comes late may have fewer in the histogram.
    exact = {key for key in names if not key[0].endswith("_bucket") and "step_duration" not in key[0]}
    assert {key: seen[-1].get(key) for key in exact} == {key: seen[-2].get(key) for key in exact}
    trained = (item[1] for item in items if isinstance(item, tuple))
    assert seen[-1]["elastic_steps_total",] == max(trained, default=0)
    recovered = {key[1]: value for key, value in seen[-1].items() if key[0] == "elastic_recoveries_total"}
    assert sum(recovered.values()) == sum(each.step is not None for each in late.recoveries)
