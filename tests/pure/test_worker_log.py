"""A worker that cannot write its log goes on training."""

import os
import sys

from elastic.worker.main import unbuffered


def test_a_line_on_a_full_disk_is_lost_and_raises_nothing():
    """/dev/full answers every write as a full disk does.

    The recipe prints, flushes, and writes more than one buffer.
    """
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        log = unbuffered(descriptor, sys.__stdout__)
        print("step 1", file=log, flush=True)
        log.write("x" * 2**20)
        log.flush()
    finally:
        os.close(descriptor)


def test_what_is_printed_is_in_the_log_without_a_flush(tmp_path):
    """A worker that is killed has no time to flush."""
    with (tmp_path / "log").open("w") as file:
        print("step 1", file=unbuffered(file.fileno(), sys.__stdout__))

        assert (tmp_path / "log").read_text() == "step 1\n"
