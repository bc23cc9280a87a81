"""A report of a long run has the figures of all of its lines, and keeps few of them in memory."""

import json
import re
import subprocess
import sys

from drawn_runs import write_whole
from hypothesis import given
from hypothesis import strategies as st

from elastic.config.run_dir import RunDir
from elastic.observe import metrics
from elastic.observe.reader import RunReader, read_run
from elastic.observe.step_columns import by_generation, columns_of

numbers = st.one_of(
    st.integers(-3, 3),
    st.integers(-(10**30), 10**30),
    st.floats(width=32),
    st.sampled_from([1e99, 1e101, 10**100, 2**63, 1.0, -0.0, True, None, "1", [1], {}]),
)
NAMED = ["step", "epoch", "world_size", "generation", "time", "seconds", "audited", "loss", "x", "value_0"]
records = st.dictionaries(st.sampled_from([*NAMED, "an ä"]), numbers)
ODD = [
    b'{"step": 1, "step": 2, "x": "\xff"}',
    b'{"step": 7, "x": NaN, "time": Infinity}',
    b'{"step": 8, "x": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'\t{"step": 9} \r',
    '{"step": 5, "x": "ä\u2028"}'.encode(),
]
lines = st.one_of(
    records.map(lambda record: json.dumps({"step": 1} | record).encode()),
    records.map(lambda record: json.dumps(record).encode()),
    st.builds(
        lambda n, g: b'{"step": %d, "generation": %d, "time": 2.5, "seconds": 0.5}' % (n, g),
        *[st.integers(1, 9)] * 2,
    ),
    st.sampled_from([b"", b"  ", b"{", b'{"step":', b'3, "step": 4}', b'{"step": 1}{"step": 2}', *ODD]),
)


def test_a_line_too_long_for_a_reader_counts_as_unreadable(tmp_path):
    """As a block of zeros where lines were: it holds no end of a line."""
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 1}\n', bytes(3_000_000) + b"\n", b'{"step": 2}\n', b"no\n", b"\n", b'{"step": 3']
    path.write_bytes(b"".join(lines))
    found = read_run(RunDir.parse(str(tmp_path)))
    assert (found.steps.step.tolist(), found.unreadable_lines) == ([1, 2], 2)


def fields_of(lines):
    """All fields of all steps, times as floats, with each value that a step logged."""
    return [
        (repr(columns_of([line]).tolist()), line.epoch, repr((line.loss, line.chain, line.values)))
        for line in lines
    ]


@given(st.lists(lines, max_size=12), st.lists(st.integers(0, 400), max_size=4))
def test_a_reader_that_comes_again_reads_each_line_once(tmp_path_factory, found, places):
    """It comes whenever a part of the file is there, cut anywhere: numbers of other types and
    sizes, several objects in a line, one in several, and no JSON.
    """
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    text = b"\n".join([*found, b""])
    (again, whole), read = (RunReader(RunDir.parse(str(path.parent)), with_values=True) for _ in "ab"), []
    for place in [*sorted(places), len(text)]:
        path.open("ab").write(text[path.stat().st_size if path.exists() else 0 : place])
        read += [line for batch in again.new_steps() for line in batch.lines]
        record = whole.read()
    counted = metrics.read(path)
    assert fields_of(read) == fields_of(counted)
    assert record.unreadable_lines == sum(1 for line in found if line.strip()) - len(counted)
    assert repr(record.steps.tolist()) == repr(columns_of(counted).tolist())
    of_each = [each.tolist() for each in by_generation(record.steps).values()]
    numbers, all_steps = sorted({*record.steps.generation}), record.steps.tolist()
    assert repr(of_each) == repr([[one for one in all_steps if one[1] == number] for number in numbers])


def test_of_a_run_that_was_set_aside_nothing_is_left(tmp_path):
    """The next one waits for nodes: it has no step yet."""
    run = write_whole(tmp_path / "run", 120)
    again = RunReader(RunDir.parse(str(run)))
    assert len(again.read().steps) == 120
    run.rename(tmp_path / "aside")
    (run / "events").mkdir(parents=True)

    found = again.read()
    assert (len(found.steps), found.newest, found.events) == (0, None, [])


# The most memory since it was executed: what rusage tells includes that of the process before.
SHOWS_PEAK = """
import sys
from elastic.cli import main
code = main(sys.argv[1:])
sys.exit(print(open("/proc/self/status").read(), file=sys.stderr) or code)
"""


def test_a_long_run_needs_no_memory_for_its_lines(tmp_path):
    """The most that the process ever had, beside that of a short run: 50 000 lines take 9.5 MB as
    text, and 75 MB as objects.
    """
    runs = [write_whole(tmp_path / f"{steps}", steps) for steps in (1000, 50_000)]
    for command in ("report {} --html {}.html", "diff {} {}"):
        most = []
        for run in runs:
            words = [sys.executable, "-c", SHOWS_PEAK, *command.replace("{}", str(run)).split()]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            most.append(int(re.search(r"VmHWM:\s+(\d+) kB", done.stderr)[1]) * 1024)
        assert most[1] - most[0] < 35e6, command
