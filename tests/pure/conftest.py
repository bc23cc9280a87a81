"""Fixtures that several test files share."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from elastic.testing.ranks import Ranks

# No deadline: on a busy machine a slow example is no error.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def ranks():
    """Up to five real ranks over gloo, started at the first use."""
    with Ranks(5) as started:
        yield started


@pytest.fixture
def wait_until():
    """Wait for a condition that another thread or process brings about, for a minute at most."""
    return _wait_until


def _wait_until(is_so):
    deadline_s = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.fixture
def closed_backlogs():
    """Those that the test has made are closed at its end: an agent's ends with its process."""
    yield
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if str(path.readlink()).startswith("/memfd:elastic-backlog"):
                os.close(int(path.name))
