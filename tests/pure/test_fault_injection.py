"""Which process injects which fault, and how often: claims, slowdowns, random kills."""

import itertools
from contextlib import nullcontext

import pytest
import run_records

from elastic.agent.fault_injection import RandomKills
from elastic.faults.inject import Claims, FaultInjector, InjectedFault, WorkerFaults
from elastic.faults.plan import parse
from elastic.observe.log import EventLog
from elastic.testing.fakes import FakeClock


def worker(folder, plan, *, rank=0, generation=1, clock=None):
    clock = clock or FakeClock()
    log = EventLog(folder / "events" / f"{rank}.jsonl", node="a", clock=clock)
    injector = FaultInjector(plan, folder / "faults", log, clock)
    return WorkerFaults(injector=injector, rank=rank, generation=generation)


def test_a_fault_strikes_once_however_often_its_step_is_redone(tmp_path):
    """Three processes reach the step. By then the plan has another line before it, which strikes:
    claims must not depend on line numbers.
    """
    fault, other = "step 3 rank 1 mid-sum: raise", "step 2 rank 1: raise"
    for plan, is_new in ((fault, True), (fault, False), (f"{other}; {fault}", False)):
        faults = worker(tmp_path, plan, rank=1)
        point = faults.at_step(3)
        for passed in ("forward", "backward"):
            point(passed)
        with pytest.raises(InjectedFault) if is_new else nullcontext():
            point("mid-sum")
    with pytest.raises(InjectedFault):
        faults.at_step(2)("forward")
    events = run_records.events(tmp_path / "events")
    assert [(each["fault"], each["step"]) for each in events] == [(fault, 3), (other, 2)]


def test_a_fault_strikes_its_own_rank_step_and_generation_only(tmp_path):
    plan, struck = "step 3 rank 1 backward: raise; generation 2 rank 1 restore: raise", []
    for here in itertools.product((0, 1), (1, 2), (2, 3, 4), ("forward", "backward", "restore")):
        rank, generation, step, point = here
        faults = worker(tmp_path, plan, rank=rank, generation=generation)
        try:
            faults.at_restore() if point == "restore" else faults.at_step(step)(point)
        except InjectedFault:
            struck.append(here)
    assert struck == [(1, 1, 3, "backward"), (1, 2, 2, "restore")]


def test_each_shard_of_a_slow_rank_waits_from_its_step_on(tmp_path):
    clock = FakeClock()
    faults = worker(tmp_path, "step 2: slow 1.5s", clock=clock)
    taken = []
    for step in range(1, 6):
        began_s, point = clock.now, faults.at_step(step)
        for _ in range(3):  # its shards
            point("forward")
        taken.append(clock.now - began_s)
    assert taken == [0, 4.5, 4.5, 4.5, 4.5]


def test_agents_carry_out_each_random_kill_once_without_messages(tmp_path):
    """Three agents of two workers each, 4000 polls: each kill hits the rank that was drawn, and
    none is early. Agents that take their places kill again.
    """
    clock, killed = FakeClock(), []
    (fault,) = parse("every 20±10s: kill random worker, seed 7")

    def poll(times):
        agents = [RandomKills(fault, fault.trigger, Claims(tmp_path), clock) for _ in range(3)]
        for _ in range(times):
            clock.now += 0.25
            for node, agent in enumerate(agents):
                pid = agent.poll(6, {rank: 100 + rank for rank in (2 * node, 2 * node + 1)})
                killed.extend([] if pid is None else [(clock.now - 1000, pid - 100)])

    poll(4000)
    assert [rank for _, rank in killed] == [fault.trigger.pick(n, 6) for n in range(len(killed))]
    assert {rank for _, rank in killed} == set(range(6))
    times = [0.0, *(time for time, _ in killed)]
    waits = [later - before for before, later in itertools.pairwise(times)]
    assert all(0 <= wait - fault.trigger.wait_s(n) <= 1 for n, wait in enumerate(waits))
    assert len(waits) >= 40
    killed.clear()
    poll(400)  # by others: the claim of the line is taken
    assert len(killed) >= 3
