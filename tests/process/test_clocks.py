"""A wall clock that is set while a job runs, or was wrong before, changes no duration."""

import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

DAY_S = 86_400
# In the command, and in each interpreter that it starts, which imports it first.
SET_CLOCK = """
import os, time
from pathlib import Path

real, path = time.time, Path(os.environ["SET_CLOCK"])
time.time = lambda: real() + int(path.read_text())
"""


class Clock:
    """The wall clock of one node."""

    def __init__(self, folder: Path, ahead_s: int) -> None:
        self.path = folder / "ahead"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SET_CLOCK)
        self.command = folder / "command.py"
        self.command.write_text(f"{SET_CLOCK}\nfrom elastic import cli\ncli.command()\n")
        self.env = {"PYTHONPATH": str(folder), "SET_CLOCK": str(self.path)}
        self.set(ahead_s)

    def set(self, ahead_s: int) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(str(ahead_s))
        new.replace(self.path)


def test_no_phase_outlasts_a_run_whose_clock_is_set(drill, undisturbed):
    """One of two nodes: its clock is a day behind, goes a day ahead, a worker is killed, and the
    clock goes to two hours before the true time.
    """
    began_s, clock = time.monotonic(), Clock(drill.folder / "clock", -DAY_S)
    options = ("--max-nodes", "2", "--last-call", "10min")
    drill.shut(6, 10, 14)
    drill.start_script(clock.command, *drill._command(options), env=clock.env)
    drill.start(*options)
    drill.stands(6, ranks=2)
    clock.set(DAY_S)
    drill.open(6)
    drill.stands(10, ranks=2)
    drill.kill_worker(1, generation=1)
    drill.open(10)
    drill.stands(14, ranks=2)
    clock.set(-7200)
    drill.open(14)
    for agent in drill.agents:
        agent.ends_with(0)
    took_s = time.monotonic() - began_s

    drill.is_like(undisturbed)
    _, report = drill.inspects("report", drill.run.url)
    assert sum(report["badput_s"].values()) < took_s
    (recovery,) = report["recoveries"]
    assert 0 < recovery["total_s"] < took_s
    assert recovery["rendezvous_s"] < took_s and report["goodput"] > 0
