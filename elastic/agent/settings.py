"""What an agent is told once, at its start, and never changes."""

from dataclasses import dataclass
from pathlib import Path

from elastic.agent.hangs.hang_detector import HangDetector
from elastic.config.run_dir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    run: RunDir
    run_id: str  # empty where the script knows nothing of us
    node: str
    recipe: str
    arguments: tuple[str, ...]
    max_restarts: int
    keep_alive_s: float
    save_every: str
    snapshot_every: str
    faults: str | None
    uses_library: bool  # False: the script knows nothing of us, and is asked to stop as torchrun asks
    errors: Path  # folder for the workers' error files
    uploader_socket: str
    silences: HangDetector | None  # None: nobody looks for workers that hang
