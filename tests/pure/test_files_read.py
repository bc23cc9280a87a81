"""A file that an earlier step wrote and a later one reads, by each way in which recipes read."""

import builtins
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic.events import UnsavedVariables
from elastic.train.files_read import FilesRead
from elastic.train.unsaved_sentences import sentence

BEGAN, STEP = 1000.0, 2000.0  # seconds since 1970


def read_with_open(path):
    with open(path) as file:  # noqa: PTH123 - as recipes write it
        return json.load(file)


WAYS = {
    "open": (lambda path: path.write_text("{}"), read_with_open),
    "pathlib": (lambda path: path.write_text("{}"), Path.read_text),
    "torch.load": (lambda path: torch.save({"w": torch.ones(2)}, path), torch.load),
    "torch.load of a text": (
        lambda path: torch.save(torch.ones(2), path),
        lambda path: torch.load(str(path)),
    ),
    "NumPy": (lambda path: path.write_bytes(_bytes_of_array()), np.load),
}


def _bytes_of_array():
    file = io.BytesIO()
    np.save(file, np.ones(2))
    return file.getvalue()


def watching(since_s=BEGAN):
    return FilesRead(file_time_s=lambda: STEP, since_s=since_s)


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_an_earlier_step_wrote_is_named_once_where_a_step_reads_it(way, tmp_path):
    write, read = WAYS[way]
    files, path = watching(), tmp_path / "best"
    write(path)
    os.utime(path, (STEP - 10, STEP - 10))
    with files.watched():
        read(path)
        read(path)
    assert files.new() == [str(path)]
    with files.watched():
        read(path)
    assert files.new() == []


OTHERS = {
    "one from before the run": BEGAN - 10,
    "one that this step has written": STEP + 1,
    "one that this step has written, by a clock that goes in ticks": STEP - 0.004,
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_files_are_left_alone(other, tmp_path):
    files, path = watching(), tmp_path / "data"
    path.write_text("{}")
    os.utime(path, (OTHERS[other], OTHERS[other]))
    with files.watched():
        read_with_open(path)
    assert files.new() == []


def test_what_is_written_added_to_or_missing_is_left_alone(tmp_path):
    """As a log to which each step adds a line."""
    files, path = watching(), tmp_path / "log"
    path.write_text("")
    with files.watched():
        os.utime(path, (STEP - 10, STEP - 10))
        with path.open("a") as file:
            file.write("step")
        with pytest.raises(FileNotFoundError):
            (tmp_path / "missing").read_text()
    assert files.new() == []


def test_what_the_functions_of_a_step_read_is_left_alone(tmp_path):
    """They run below this library, which loads samples and computes shards: that may be a cache."""
    files, path = watching(), tmp_path / "sample"
    path.write_text("{}")
    os.utime(path, (STEP - 10, STEP - 10))
    space = {"__name__": "elastic.train.step", "read": read_with_open}
    exec("def mean_loss(path):\n    return read(path)", space)
    with files.watched():
        space["mean_loss"](path)
    assert files.new() == []


def test_open_is_python_s_own_outside_of_a_step_s_body():
    files, opened = watching(), (builtins.open, io.open)
    with pytest.raises(FileNotFoundError), files.watched():
        read_with_open("missing")
    assert (builtins.open, io.open) == opened


def test_the_note_says_what_a_restart_finds_in_the_file():
    said = sentence(UnsavedVariables(step=4, changing=[], after_loop=[], files=["best.pt"]))
    assert said.startswith("note: a step reads the file best.pt, which an earlier step has written")
