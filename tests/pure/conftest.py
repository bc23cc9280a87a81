"""Fixtures that several test files share."""

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
