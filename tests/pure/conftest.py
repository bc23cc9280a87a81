"""Fixtures that several test files share."""

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
