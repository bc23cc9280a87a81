"""Which comparison finds which kind of hidden state, in which run: the table of docs/proof.md.

    python tests/hidden_state/measure.py [PART OF A NAME ...]

plays each recipe of the table and its twin undisturbed, with one worker and with two, and each one
that is not found there under `elastic-train check`. It writes outcomes.json beside this file, and
docs/proof.md from that.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.hidden_state.kept_by_functions import KINDS as BY_FUNCTIONS
from tests.hidden_state.kept_by_the_loop import KINDS as BY_THE_LOOP
from tests.hidden_state.kind import Acts, Kind

HERE = Path(__file__).parent
OUTCOMES, DOCUMENT = HERE / "outcomes.json", HERE.parent.parent / "docs" / "proof.md"
KINDS: tuple[Kind, ...] = BY_THE_LOOP + BY_FUNCTIONS
AT_ONCE, LIMIT_S = 2, 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one kind. one, two, check: how the recipe ended with so many workers, and under check; ""
    where it was not played. twin_one, twin_two: the same of the twin, "ok" where nothing was said.
    """

    one: str
    two: str
    check: str
    twin_one: str
    twin_two: str

    @property
    def is_found(self) -> bool:
        """In the undisturbed run with one worker."""
        return self.one not in ("", "ok")


def play(recipe: str, workers: int) -> str:
    """Train it; returns by what it was found, or "ok"."""
    with tempfile.TemporaryDirectory() as folder:
        path, run = Path(folder) / "recipe.py", Path(folder) / "run"
        path.write_text(recipe)
        command = [sys.executable, "-m", "elastic.cli", "recipe.py", "--run-dir", "run"]
        options = ["--nproc-per-node", str(workers), "--rehearse", "auto"]
        ended = _run([*command, *options], folder)
        return _named(ended, _events(run))


def checked(recipe: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipe.py").write_text(recipe)
        ended = _run([sys.executable, "-m", "elastic.cli", "check", "recipe.py", "--steps", "10"], folder)
    return "ok" if ended.returncode == 0 else "check"


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(HERE.parent.parent)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def _events(run: Path) -> list[dict]:
    lines = [line for file in sorted(run.glob("events/*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def _named(ended: subprocess.CompletedProcess[str], events: list[dict]) -> str:
    kinds = {event["event"] for event in events}
    said = ended.stdout + ended.stderr
    if ended.returncode == 2:
        return "refused"
    if ended.returncode == 1:
        for kind, name in (
            ("step_differed", "rehearsal"),
            ("audit_failed", "audit"),
            ("divergence_detected", "agreement"),
            ("replay_differed", "replay"),
        ):
            if kind in kinds:
                return name
        return "the second start" if "started again" in said else f"error: {said.strip()[-200:]}"
    if ended.returncode != 0:
        return f"exit {ended.returncode}: {said.strip()[-200:]}"
    left = [event for event in events if event["event"] == "rehearsed" and event["not_restored"]]
    return "named: " + ", ".join(left[-1]["not_restored"]) if left else "ok"


def measure(kind: Kind) -> Outcome:
    recipes = kind.recipes
    one, two = play(recipes["wrong"], 1), play(recipes["wrong"], 2)
    check = checked(recipes["wrong"]) if one == "ok" else ""
    return Outcome(
        one=one,
        two=two,
        check=check,
        twin_one=play(recipes["twin"], 1),
        twin_two=play(recipes["twin"], 2),
    )


def document(outcomes: dict[str, Outcome]) -> str:
    """docs/proof.md."""
    early = [kind for kind in KINDS if kind.acts in (Acts.STEP, Acts.EPOCH, Acts.NEVER)]
    found = sum(outcomes[kind.name].is_found for kind in early)
    rows = [
        f"| {kind.name} | {kind.acts.value} | {_cell(of.one)} | {_cell(of.two)} | {_cell(of.check)} |"
        for kind in KINDS
        for of in [outcomes[kind.name]]
    ]
    return "\n".join(
        [
            "# What finds hidden state",
            "",
            "`make proof` makes this table: each kind of state outside `State`, where it acts, and",
            "by what it was found in an undisturbed run of three epochs of six steps with one worker, with two, and by",
            "`elastic-train check` where one worker did not find it. *named*: the run goes on, since every result was the",
            "same, and the rehearsal's line says what a restart does not bring back. Each has a twin that does the same",
            "rightly, which goes on to its end; the rehearsal's line may name what it only shows.",
            "",
            f"Of the {len(early)} kinds that act within the first epoch and its end, or never, {found} are found in the",
            "undisturbed run with one worker.",
            "",
            "| kind | acts | one worker | two workers | check |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _cell(outcome: str) -> str:
    return {"ok": "no", "": ""}.get(outcome, re.sub(r"[|\n]", " ", outcome.partition(":")[0]))


def main() -> None:
    known = {}
    if OUTCOMES.exists():
        known = {name: Outcome(**each) for name, each in json.loads(OUTCOMES.read_text()).items()}
    wanted = [kind for kind in KINDS if not sys.argv[1:] or any(part in kind.name for part in sys.argv[1:])]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for kind, outcome in zip(wanted, pool.map(measure, wanted), strict=True):
            known[kind.name] = outcome
            print(f"{kind.name} ({kind.acts.value}): {outcome}", flush=True)
    known = {kind.name: known[kind.name] for kind in KINDS if kind.name in known}
    OUTCOMES.write_text(json.dumps({name: asdict(each) for name, each in known.items()}, indent=1) + "\n")
    if len(known) == len(KINDS):
        DOCUMENT.write_text(document(known))


if __name__ == "__main__":
    main()
