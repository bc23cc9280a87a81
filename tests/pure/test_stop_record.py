"""Where a recipe ended its run early is written down once, and read back or refused."""

import pytest

from elastic.checkpoint import stop_record
from elastic.checkpoint.stop_record import StopRecord
from elastic.errors import StoreFailed, UsageError
from elastic.storage.remote import open_store
from elastic.system.clock import SystemClock

CLOCK = SystemClock()


def record(step=9, run_id="run"):
    return StopRecord(run_id=run_id, step=step, steps=18, reason="enough")


def test_of_two_ends_of_a_run_the_first_stays(tmp_path):
    """A recipe that decides by a variable of the loop leaves elsewhere after a restart."""
    store = open_store(str(tmp_path))
    assert stop_record.read(store, "run", CLOCK) is None
    stop_record.create(store, record(), CLOCK)
    stop_record.create(store, record(), CLOCK)
    with pytest.raises(UsageError, match=r"after step 12, but this run was stopped .* after step 9 of 18"):
        stop_record.create(store, record(12), CLOCK)
    assert stop_record.read(store, "run", CLOCK) == record()


def test_the_end_of_another_run_is_not_believed(tmp_path):
    store = open_store(str(tmp_path))
    stop_record.create(store, record(run_id="other"), CLOCK)
    assert stop_record.read(store, "run", CLOCK) is None
    with pytest.raises(StoreFailed, match="of another run"):
        stop_record.create(store, record(), CLOCK)


@pytest.mark.parametrize("data", [b"", b"{}", record().to_json()[:-9], b"x" * 2**17])
def test_a_record_that_is_damaged_is_refused_with_what_to_do(data, tmp_path):
    """Torn, empty, too large: where the run ends must not be guessed."""
    (tmp_path / stop_record.NAME).write_bytes(data)
    with pytest.raises(UsageError, match="remove it to train on"):
        stop_record.read(open_store(str(tmp_path)), "run", CLOCK)
