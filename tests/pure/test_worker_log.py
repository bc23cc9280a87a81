"""A worker that cannot write its log trains on."""

import os
import sys

from elastic.worker.main import unbuffered


def test_a_line_that_finds_the_disk_full_is_lost_and_raises_nothing():
    """/dev/full answers every write as a full disk does; the recipe prints, flushes, and writes what does not fit at once."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        log = unbuffered(descriptor, sys.__stdout__)
        print("step 1", file=log, flush=True)
        log.write("x" * 2**20)
        log.flush()
    finally:
        os.close(descriptor)


def test_what_is_printed_is_in_the_log_at_once(tmp_path):
    """Nobody flushes: a worker that is killed has not the time to."""
    with (tmp_path / "log").open("w") as file:
        print("step 1", file=unbuffered(file.fileno(), sys.__stdout__))

        assert (tmp_path / "log").read_text() == "step 1\n"
