"""A worker beats in the phase that the agent must judge it by."""

from types import SimpleNamespace

import pytest

from elastic.system.silence import Phase
from elastic.worker.heartbeat import WARMUP_STEPS, HeartbeatSender


def test_a_worker_starts_until_its_second_step_is_done():
    """The first step waits for peers, too.

    It must not show as WAIT: its compilation may take longer than a peer's step.
    """
    phases = []
    heartbeat = HeartbeatSender(SimpleNamespace(beat=lambda _rank, phase: phases.append(phase)), 0)
    for _ in range(WARMUP_STEPS):
        heartbeat.enter(Phase.STEP)
        with heartbeat.waiting():
            heartbeat.enter(Phase.SAVE)
        heartbeat.finish_step()
    assert set(phases) == {Phase.START}
    phases.clear()

    heartbeat.enter(Phase.STEP)
    with pytest.raises(RuntimeError), heartbeat.waiting():
        raise RuntimeError("a peer died")
    heartbeat.enter(Phase.SAVE)
    with heartbeat.waiting():
        pass
    assert phases == [Phase.STEP, Phase.WAIT, Phase.STEP, Phase.SAVE, Phase.SAVE, Phase.SAVE]
