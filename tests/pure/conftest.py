"""Fixtures that several test files share."""

import pytest
from hypothesis import settings

from elastic.testing.ranks import Ranks

# No test depends on speed: an example that is slow on a busy machine is not wrong.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def ranks():
    """Up to five real ranks over gloo, started at the first use."""
    with Ranks(5) as started:
        yield started
