"""Fixtures that several test files share."""

import pytest

from elastic.testing import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Up to five real ranks over gloo, started at the first use."""
    with Ranks(5) as started:
        yield started
