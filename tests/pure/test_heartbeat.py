"""A worker beats in the phase that the agent must judge it by."""

import pytest

from elastic.system.silence import Phase
from elastic.worker.heartbeat import WARMUP_STEPS, HeartbeatSender


class Recording:
    def __init__(self):
        self.phases = []

    def beat(self, _local_rank, phase):
        self.phases.append(phase)


def test_a_worker_starts_until_its_second_step_is_done():
    """The first step waits for peers, too.

    It must not show as WAIT: its compilation may take longer than a peer's step.
    """
    page = Recording()
    heartbeat = HeartbeatSender(page, 0)
    for _ in range(WARMUP_STEPS):
        heartbeat.enter(Phase.STEP)
        with heartbeat.waiting():
            heartbeat.enter(Phase.SAVE)
        heartbeat.finish_step()
    assert set(page.phases) == {Phase.START}
    page.phases.clear()

    heartbeat.enter(Phase.STEP)
    with pytest.raises(RuntimeError), heartbeat.waiting():
        raise RuntimeError("a peer died")
    heartbeat.enter(Phase.SAVE)
    with heartbeat.waiting():
        pass
    assert page.phases == [Phase.STEP, Phase.WAIT, Phase.STEP, Phase.SAVE, Phase.SAVE, Phase.SAVE]
