"""A report of a long run has the figures of all of its lines, and keeps few of them in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_run import write_long_run

from elastic.observe import metrics, read_columns
from elastic.observe.log import read_events
from elastic.observe.read_columns import read_columns as columns_in
from elastic.observe.step_columns import columns_of
from elastic.report.report import summarise

numbers = st.one_of(
    st.integers(-3, 3),
    st.integers(-(10**30), 10**30),
    st.floats(width=32),
    st.sampled_from([1e99, 1e101, 10**100, 2**63, 1.0, -0.0, True, None, "1", [1], {}]),
)
records = st.dictionaries(
    st.sampled_from(["step", "epoch", "world_size", "generation", "time", "seconds", "audited", "loss", "x"]),
    numbers,
)
lines = st.one_of(
    records.map(lambda record: json.dumps({"step": 1} | record).encode()),
    records.map(lambda record: json.dumps(record).encode()),
    st.builds(
        lambda n, g: b'{"step": %d, "generation": %d, "time": 2.5, "seconds": 0.5}' % (n, g),
        *[st.integers(1, 9)] * 2,
    ),
    st.sampled_from(
        [
            b"",
            b"  ",
            b"{",
            b'{"step": 1}{"step": 2}',
            b'{"step":',
            b'3, "step": 4}',
            b'{"step": 1, "step": 2, "x": "\xff"}',
            b'{"step": 7, "x": NaN, "time": Infinity}',
            b'{"step": 8, "x": ' + b"[" * 2000 + b"]" * 2000 + b"}",
            b'\t{"step": 9} \r',
            '{"step": 5, "x": "ä\u2028"}'.encode(),
        ]
    ),
)


@given(st.lists(lines, max_size=12))
def test_the_columns_are_those_of_the_lines_whatever_stands_in_the_file(tmp_path_factory, found):
    """Numbers of other types and sizes, several objects in a line, one in several, and no JSON."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(b"\n".join([*found, b""]))
    assert columns_in(path) == columns_of(metrics.read(path))


def test_a_line_is_read_twice_only_where_it_is_no_line_of_a_step(tmp_path, monkeypatch):
    """Else the report would be right, and as slow as before."""
    parsed = []
    original = read_columns.parse_lines
    monkeypatch.setattr(read_columns, "parse_lines", lambda *given: parsed.append(1) or original(*given))
    run = write_long_run(tmp_path / "run", 20_000)

    assert columns_in(run / "metrics.jsonl") == columns_of(metrics.read(run / "metrics.jsonl"))
    assert parsed == []


def test_a_report_has_the_same_figures_from_lines_and_from_columns(tmp_path):
    """Over two restarts, to the last bit of each sum."""
    run = write_long_run(tmp_path / "run", 120_000)
    events = read_events(run / "events")
    found = summarise(events, columns_in(run / "metrics.jsonl"))

    assert found == summarise(events, metrics.read(run / "metrics.jsonl"))
    assert (found.steps, found.lost_steps, found.audits.done) == (120_000, 80, 1200)
    assert [each.last_step for each in found.generations] == [50_000, 100_000, 120_000]


@pytest.mark.parametrize("command", ["report", "status", "runs"])
def test_a_long_run_needs_no_memory_for_its_lines(command, tmp_path):
    """The most that the process ever had, beside that of a short run: 200 000 lines take 38 MB as
    text, and far more as objects.
    """
    most = []
    for steps in (1000, 200_000):
        run = write_long_run(tmp_path / f"{steps}", steps)
        child = subprocess.Popen(
            [sys.executable, "-m", "elastic.cli", command, str(run), "--json"],
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
        )
        _, code, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(code)
        assert child.returncode == 0
        most.append(usage.ru_maxrss * 1024)
    assert most[1] - most[0] < 30e6
