"""One run directory under Slurm, and everything that a scenario does to it.

Scenarios wait for events and for states of jobs, never for a time. The recipe stands before a shut
gate until the scenario opens it, so a fault strikes a run that provably trains.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import run_records
from gates import Gates, wait_for
from slurm import POLL_S, Slurm

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "process" / "recipes" / "tiny.py"
SCRIPTS = ROOT / "deploy" / "slurm"

T = TypeVar("T")


@dataclass
class JobRun(Gates):
    """folder: holds the run directory, the gates and what the jobs print."""

    slurm: Slurm
    folder: Path
    jobs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gates, self.url = self.folder / "gates", self.folder / "run"
        self.samples = self.folder / "samples"
        self.gates.mkdir(parents=True)
        self.samples.mkdir()

    def submit(
        self, script: str, *words: str, options: tuple[str, ...] = (), user: Mapping[str, str] | None = None
    ) -> str:
        """The number of the job. words: for sbatch. options: for elastic-train. user: variables."""
        variables = {
            "TINY_GATES": str(self.gates),
            "TINY_SAMPLES": str(self.samples),
            "PYTHONUNBUFFERED": "1",
        }
        variables |= user or {}
        output = str(self.folder / "job-%j.out")
        sbatch = ("sbatch", "--parsable", f"--output={output}", *words, str(SCRIPTS / script))
        ours = (str(TINY), "--run-dir", str(self.url), "--save-every", "4steps", "--rehearse", "off")
        job = self.slurm.call(*sbatch, *ours, "--last-call", "60", *options, **variables)
        self.jobs.append(job)
        return job

    # What happens.

    def stands(self, step: int, ranks: int) -> None:
        self.wait_for(lambda: self.stand(step, ranks), f"{ranks} ranks at step {step}")

    def wait_for(self, condition: Callable[[], T], what: str) -> T:
        return wait_for(condition, what, poll_s=POLL_S)

    def events(self, name: str, **fields: Any) -> list[run_records.Record]:
        return run_records.matching(run_records.events(self.url / "events"), name, **fields)

    def happens(self, name: str, count: int = 1, **fields: Any) -> run_records.Record:
        """The first of these events, once there are so many."""

        def there() -> list[run_records.Record]:
            found = self.events(name, **fields)
            return found if len(found) >= count else []

        return self.wait_for(there, f"{name} {fields}")[0]

    def hosts(self) -> list[str]:
        """Slurm's names of the nodes on which agents have begun to meet the others."""
        return [str(event["host"]) for event in self.events("node_scheduled")]

    def is_requeued(self, job: str) -> None:
        """Wait until Slurm has requeued the job, once, and its processes are gone."""

        def waits_again() -> bool:
            state = self.slurm.state(job)
            return (state["JobState"], state["Restarts"]) == ("PENDING", "1")

        self.wait_for(waits_again, f"job {job} to be requeued")

    def ends(self, job: str, state: str = "COMPLETED") -> None:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        found = self.wait_for(
            lambda: (now := self.slurm.state(job)["JobState"]) in ended and now, f"job {job} to end"
        )
        if found != state:
            raise RuntimeError(f"expected job {job} to be {state} at its end, found {found}")
