"""A writer that is frozen before any system call, and wakes up late, takes no line away."""

import io
import os
from contextlib import contextmanager, suppress

import pytest

from elastic.errors import Fenced
from elastic.observe import metrics as metrics_module
from elastic.observe.metrics import Metrics, own_file, read
from elastic.observe.step_line import StepLine

CALLS = ("open", "write", "fsync", "link", "unlink", "remove", "rename", "replace", "stat", "lstat", "scandir", "listdir", "ftruncate", "pread")  # fmt: skip
MOST_CALLS = 200


@contextmanager
def frozen_before(number, meanwhile):
    """Before its system call of this number the process sleeps, and others do something; yields the
    calls.
    """
    calls = []

    def wrapped(call):
        def counted(*arguments, **options):
            calls.append(call)
            if len(calls) == number:
                meanwhile()
            return call(*arguments, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (*((os, name) for name in CALLS), (io, "open")):
            patch.setattr(module, name, wrapped(getattr(module, name)))
        yield calls


def line(step, generation):
    return StepLine(step=step, loss=0.5, generation=generation)


def record(path):
    return [(each.step, each.generation) for each in read(path)]


def begun(folder):
    """Generation 1 has trained three steps."""
    folder.mkdir()
    path = folder / "metrics.jsonl"
    trained(path, 1, 0, 3)
    return path


def trained(path, generation, rewound, last):
    lines = Metrics(path, generation=generation)
    found = lines.rewind(rewound)
    for step in range(rewound + 1, last + 1):
        lines.append(line(step, generation))
    return lines, found


@pytest.mark.parametrize("newer", [1, 3])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_sleeping_rank_0_takes_no_line_of_a_newer_generation(tmp_path, newer, goes_on):
    """Rank 0 of generation 2 goes back to step 2 and writes a line. While it sleeps, newer ones go
    back to step 2 and train two steps each; the newest writes one more afterwards, or is dead by
    then. All lines of the newest are there, also under the name that others read.
    """
    for number in range(1, MOST_CALLS):
        path, writers = begun(tmp_path / str(number)), []

        def meanwhile(path=path, writers=writers):
            for generation in range(3, 3 + newer):
                lines, found = trained(path, generation, 2, 4)
                assert found.last == line(2, 1)
                writers.append(lines)

        sleeper, newest = Metrics(path, generation=2), 2 + newer
        # One that comes late is refused.
        refusal = pytest.raises(Fenced) if number == 1 else suppress(Fenced)
        with frozen_before(number, meanwhile) as calls, refusal:
            sleeper.rewind(2)
            sleeper.append(line(3, 2))
        if len(calls) < number:
            break
        for writer in writers[-1:] if goes_on else []:
            writer.append(line(5, newest))
            writer.sync()
        expected = [(1, 1), (2, 1), *((step, newest) for step in range(3, 5 + goes_on))]
        for _ in range(2):
            assert record(path) == expected, number
            assert path.read_bytes() == own_file(path, newest).read_bytes(), number
            sleeper.append(line(4, 2))
            sleeper.sync()
    assert 20 < number < MOST_CALLS - 1


def test_dying_between_rename_and_next_look_costs_no_line(tmp_path, monkeypatch):
    """Generation 2 is frozen in front of the rename, and killed behind it; the newer one has ended.

    The report reads the newer lines, and the next resume has them under the usual name.
    """
    path = begun(tmp_path / "run")
    link_over = metrics_module.link_over

    def frozen(source, target):
        monkeypatch.undo()
        trained(path, 3, 2, 3)
        link_over(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics_module, "link_over", frozen)
    with pytest.raises(KeyboardInterrupt):
        Metrics(path, generation=2).rewind(2)
    assert path.read_bytes().count(b"\n") == 2
    assert record(path) == [(1, 1), (2, 1), (3, 3)]
    Metrics(path, generation=4).rewind(3)
    assert path.read_bytes().count(b"\n") == 3


def test_an_old_listing_hides_no_line(tmp_path, monkeypatch):
    """A network file system lists the folder as it was before the newest generation began."""
    path = begun(tmp_path / "run")
    trained(path, 2, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(metrics_module, "files", lambda path: {1: own_file(path, 1)})
        assert record(path) == [(1, 1), (2, 1), (3, 1), (4, 2)]
