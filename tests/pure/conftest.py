"""Fixtures that several test files share."""

import time

import pytest
from hypothesis import HealthCheck, settings

from elastic.testing.ranks import Ranks

# On a busy machine a slow example is no error, nor is slow generation of one.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
