"""The parts of an agent outlive its generations; to ask them from another thread blocks no loop.

`AgentParts` is what the loop, each generation and the monitors share. `AgentHealth` tells other
threads whether the loop turns, and whether the node is in a generation.
"""

from typing import Protocol

from elastic.agent.fault_injection import NodeFaults
from elastic.agent.final_checkpoint import FinalCheckpoint
from elastic.agent.group_client import GroupClient
from elastic.agent.settings import Settings
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.agent.snapshot_memory import SLOTS, SLOTS_WITHOUT_SNAPSHOTS, SnapshotMemory
from elastic.agent.spawner import Spawner
from elastic.config import environment
from elastic.errors import EXIT_FAILED
from elastic.events import NodeScheduled, UploaderDied
from elastic.faults.inject import Claims
from elastic.faults.plan import parse
from elastic.observe.console import ConsoleFollower
from elastic.observe.log import EventLog
from elastic.rendezvous.group import RunEnd
from elastic.rendezvous.rendezvous import Rendezvous
from elastic.system.clock import Clock, SystemClock
from elastic.system.control_page import ControlPage
from elastic.system.leave_deadline import Share
from elastic.uploader.client import MANY_DEATHS, UploaderProcess

GROUP_POLL_S = 0.025
# Far above the longest turn: a request to an object store that hangs takes 15 s.
STANDS_STILL_S = 30.0
_CLOCK = SystemClock()


class AgentHealth:
    """generation: the number of that which this node is in, None between two of them."""

    def __init__(self, clock: Clock) -> None:
        self.generation: int | None = None
        self._clock = clock
        self._turned_s = clock.monotonic()
        self._has_ended = False

    def turn(self) -> None:
        """The loop, or a wait of the loop, has turned once more."""
        self._turned_s = self._clock.monotonic()

    def end(self) -> None:
        """The node leaves: what follows, the last saves and the report, has limits of its own."""
        self._has_ended, self.generation = True, None

    @property
    def still_s(self) -> float:
        """Seconds since the last turn; 0 once the loop is over."""
        return 0.0 if self._has_ended else max(0.0, self._clock.monotonic() - self._turned_s)

    @property
    def turns(self) -> bool:
        return self.still_s < STANDS_STILL_S


class AgentParts:
    """The parts of one agent, which outlive its generations."""

    def __init__(
        self,
        settings: Settings,
        rendezvous: Rendezvous,
        shutdown: ShutdownRequest,
        spawner: Spawner,
        *,
        uploader: UploaderProcess,
        console: ConsoleFollower,
    ) -> None:
        options, run, report, clock = settings.options, settings.run, console.print_line, _CLOCK
        self.settings, self.shutdown, self.spawner, self.uploader = settings, shutdown, spawner, uploader
        self.console, self.clock = console, clock
        spawner.report = report
        self.log = _open_log(settings)
        self.page = ControlPage.create()
        slots = SLOTS_WITHOUT_SNAPSHOTS if options.snapshot_every.kind == "off" else SLOTS
        self.memory = SnapshotMemory(self.page, slots, report)
        self.group = GroupClient(rendezvous, options, report, shutdown, clock)
        self.final_checkpoint = FinalCheckpoint(
            memory=self.memory,
            settings=settings,
            uploader=uploader,
            shutdown=shutdown,
            log=self.log,
            report=report,
            clock=clock,
        )
        self.faults = NodeFaults(parse(options.faults or ""), Claims(run.faults), self.log, clock)
        self.health = AgentHealth(clock)
        self._commit = (0, 0)  # the last that `note_commit` has seen

    @property
    def step(self) -> int:
        """The last step that any worker of this node finished in this generation; 0 for none."""
        return max(self.page.step(i) for i in range(self.settings.nproc))

    @property
    def common_step(self) -> int:
        """The last step that all workers of this node finished in this generation; 0 for none."""
        return min(self.page.step(i) for i in range(self.settings.nproc))

    @property
    def has_begun(self) -> bool:
        """Whether a worker of this node is in its first step, whose line may be written already, or
        has a step behind it, in this generation or in the state that it restored.
        """
        in_step = (self.page.open_step(i) for i in range(self.settings.nproc))
        return self.step > 0 or any(in_step)

    def has_shared_state(self, generation: int) -> bool:
        """Whether the nodes of this generation are known to have the newest state of this node: a
        node that joined later, or without memory for it, has none.
        """
        newest = self.memory.newest
        return newest is None or (
            newest.info.generation == generation and newest.info.step <= self.page.shared_step
        )

    def leave_group(self, last_step: int, *, goes_alone: bool = False) -> bool:
        """Give up this node's place once its newest state is safe; the workers have stopped.

        last_step: that was trained, as far as this node knows. goes_alone: no other node goes on.
        Where other members have that state and go on with it, this node leaves before it is saved:
        they form their next generation at once and need not wait for an upload. Once they have, the
        fence stops a save by this node: then the checkpoint is theirs to commit. Where no other
        node has it, the next generation waits for the save. Returns whether other members go on.
        """
        self.health.end()
        if self.settings.imports_library:  # a plain script's state is its own
            self.shutdown.ends(last_step)
        with self.shutdown.task("the rendezvous"):
            done = self.group.withdraw(lambda number: not goes_alone and self.has_shared_state(number))
        others = done.others_go_on
        if done.generation is not None:
            # It may be one that this node was told to leave before it entered it. The next one
            # waits for the save, which must not be fenced by this one.
            self.uploader.enter(done.generation)
        with self.shutdown.task("the save of the last step"):
            self.final_checkpoint.ensure_committed(others=others, meanwhile=self.revive_uploader)
            self.note_commit()
        if differences := self.final_checkpoint.differences:
            # Nothing says which of the two states is right: no node goes on with either of them, in
            # whichever generation it is by now.
            reason = f"{self.settings.node}, which leaves, found two states of one step: {differences[0]}"
            run_end, began_s = RunEnd(exit_code=EXIT_FAILED, reason=reason), self.clock.monotonic()
            longest_s = self.shutdown.grace_s
            while not self.group.end(run_end, of_any=True):
                if self.clock.monotonic() >= self.shutdown.end_s(Share.SAVE, began_s, longest_s):
                    break
                self.clock.sleep(GROUP_POLL_S)
        with self.shutdown.task("the rendezvous"):
            self.group.leave()
        return others

    def revive_uploader(self) -> None:
        """Called in each turn of the loop, and several times a second while the loop waits."""
        self.health.turn()
        if death := self.uploader.revive():
            self.memory.release_leases()
            if death.deaths <= MANY_DEATHS:  # the events have the later ones
                self.console.print_line(str(death))
            self.log.record(UploaderDied(reason=death.reason, deaths=death.deaths, pause_s=death.pause_s))

    def note_commit(self) -> None:
        """A checkpoint that the uploader of this node committed since the last call counts."""
        if (last := self.uploader.last_commit) != self._commit:
            self._commit, step = last, last[1]
            self.shutdown.saved(step)
            self.group.note_commit(step)


class Monitor(Protocol):
    """Watches an agent from above, and is never waited for: `start` and `stop` neither raise, nor
    wait for longer than a moment.
    """

    def start(self, parts: AgentParts) -> None:
        """The agent is about to run."""

    def stop(self) -> None:
        """The run has ended for this node, and its files hold how."""


def _open_log(settings: Settings) -> EventLog:
    path = settings.run.events / f"{settings.node}-agent.jsonl"
    log = EventLog(path, node=settings.node, clock=_CLOCK)
    if (job := NodeScheduled.by_slurm(environment.variables())) is not None:
        log.record(job)
    return log
