"""What a group of some nodes costs, on the simulated clock of benchmarks/scale.py."""

import pytest
from scale import measure

from elastic.rendezvous import rendezvous


@pytest.mark.parametrize("kind", ["etcd", "c10d"])
def test_nodes_that_write_at_once_try_a_few_times_each(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-four nodes start at once, one is killed, and all leave at once. Without a random pause
    after each lost compare-and-set the first alone took 300 tries.
    """
    monkeypatch.setattr(rendezvous, "Heartbeat", rendezvous.Heartbeat)  # put back what `measure` replaces
    found = measure(kind, 24, {"kill", "leave"})
    for event in ("start", "one_killed", "all_leave"):
        assert found[event]["seconds"] is not None and found[event]["seconds"] < 2.0
        assert found[event]["versions"] <= 25
        assert found[event]["tries"] <= 8 * 24
