"""The settings of an agent never change, and its parts outlive its generations.

`Settings` is what it knows before it starts anything. `AgentParts` is what the loop, each
generation and the monitors share; to ask them from another thread blocks no loop. `AgentHealth`
tells other threads whether the loop turns, and whether the node is in a generation.
"""

import hashlib
import json
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Protocol

from elastic.agent.fault_injection import NodeFaults
from elastic.agent.group_client import GroupClient
from elastic.agent.shutdown_request import ShutdownRequest
from elastic.agent.snapshot_memory import SLOTS, SLOTS_WITHOUT_SNAPSHOTS, SnapshotMemory
from elastic.agent.worker_process import Spawner
from elastic.config import environment
from elastic.config.identity import Identity
from elastic.config.options import Options
from elastic.config.run_dir import RunDir
from elastic.events import NodeScheduled, UploaderDied
from elastic.faults.inject import Claims
from elastic.faults.plan import parse
from elastic.observe.console import ConsoleFollower
from elastic.observe.log import EventLog
from elastic.rendezvous.backends.select import RendezvousConfig
from elastic.rendezvous.group import LONGEST_NAME, RunKey
from elastic.rendezvous.rendezvous import Rendezvous
from elastic.system.clock import Clock, SystemClock
from elastic.system.control_page import ControlPage
from elastic.system.untrusted import printable
from elastic.uploader.client import DIED, UploaderProcess

GROUP_POLL_S = 0.025
# Above the usual turn: a request to an object store that hangs ends before.
STANDS_STILL_S = 30.0
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The command as it was given, and what follows from it on this node."""

    options: Options
    run: RunDir
    rendezvous: RendezvousConfig
    node: str  # the id of this agent process, which no other process ever has
    nproc: int  # workers of this node
    declared: Identity | None  # what the recipe declared; None for a script without the library
    uid: str  # of the run directory
    is_new: bool  # the run directory held no run when this agent started
    scratch: Path  # a folder of this process alone, removed at its end

    @property
    def imports_library(self) -> bool:
        """False for a script without the library, which is asked to stop as torchrun asks."""
        return self.declared is not None

    @property
    def does_steps_again(self) -> bool:
        """Whether a step may be done twice, by other workers, to compare its results."""
        options = self.options
        return self.imports_library and "off" not in (options.rehearse.kind, options.snapshot_every.kind)

    @property
    def evidence(self) -> Path:
        """Where workers leave what a step computed, for those that do it again."""
        return self.scratch / "evidence.json"

    @property
    def run_id(self) -> str:
        return "" if self.declared is None else self.declared.run_id

    @property
    def run_key(self) -> RunKey:
        """What the nodes of a group compare. A script without the library is its command."""
        options = self.options
        command = json.dumps([Path(options.recipe).name, *options.recipe_args])
        run_id = self.run_id or hashlib.sha256(command.encode()).hexdigest()[:16]
        title = printable(f"{Path(options.recipe).name} in {self.run.url}")[:LONGEST_NAME]
        return RunKey(run_id=run_id, uid=self.uid, title=title)

    def error_folder(self, generation: int) -> Path:
        """Where the workers of a generation leave the errors that ended them."""
        return self.scratch / "errors" / str(generation)


class AgentHealth:
    """generation: that which this node is in, by its number; None between two."""

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


@dataclass(eq=False)
class AgentParts:
    """difference: why a state is not saved, whose step was committed before with another state."""

    settings: Settings
    rendezvous: InitVar[Rendezvous]
    shutdown: ShutdownRequest
    spawner: Spawner
    uploader: UploaderProcess
    console: ConsoleFollower
    clock: Clock = _CLOCK
    difference: str = ""

    def __post_init__(self, rendezvous: Rendezvous) -> None:
        options, report, clock = self.settings.options, self.console.print_line, self.clock
        self.spawner.report = report
        path = self.settings.run.events / f"{self.settings.node}-agent.jsonl"
        self.log = EventLog(path, node=self.settings.node, clock=clock)
        if (job := NodeScheduled.by_slurm(environment.variables())) is not None:
            self.log.record(job)
        self.page = ControlPage.create()
        slots = SLOTS_WITHOUT_SNAPSHOTS if options.snapshot_every.kind == "off" else SLOTS
        self.memory = SnapshotMemory(self.page, slots, report)
        self.group = GroupClient(rendezvous, options, report, self.shutdown, clock)
        self.unlisted = set[str]()  # why the checkpoints could not be listed, which is said once
        claims = Claims(self.settings.run.faults)
        self.faults = NodeFaults(parse(options.faults or ""), claims, self.log, clock)
        self.health = AgentHealth(clock)
        self._commit = (0, 0)  # the last that `note_commit` has seen

    @property
    def step(self) -> int:
        """The last step that any worker of this node finished, or restored, in this generation."""
        return max(self.page.step(i) for i in range(self.settings.nproc))

    @property
    def common_step(self) -> int:
        """The last one that all of them did."""
        return min(self.page.step(i) for i in range(self.settings.nproc))

    @property
    def has_begun(self) -> bool:
        """Whether a worker of this node is in its first step, whose line may be written already, or
        has a step behind it, in this generation or in the state that it restored.
        """
        return self.step > 0 or any(self.page.open_step(i) for i in range(self.settings.nproc))

    def has_shared_state(self, generation: int) -> bool:
        """Whether the nodes of this generation are known to have the newest state of this node: a
        node that joined later, or without memory for it, has none.
        """
        if (newest := self.memory.newest) is None:
            return True
        return newest.info.generation == generation and newest.info.step <= self.page.shared_step

    def revive_uploader(self) -> None:
        """Called in each turn of the loop, and several times a second while the loop waits."""
        self.health.turn()
        if reason := self.uploader.revive():
            self.memory.release_leases()
            self.console.print_line(DIED.format(reason=reason))
            self.log.record(UploaderDied(reason=reason))

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
