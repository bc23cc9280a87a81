"""Which comparison finds which kind of hidden state, in which run: the table of docs/proof.md.

    python tests/hidden_state/measure.py [PART OF A NAME ...]

plays each recipe of the table and its twin undisturbed, with one worker and with two; without
rehearsals and audits where a worker is killed, and where a node joins and leaves; and each one that
one worker did not find under `elastic-train check`. It writes outcomes.json beside this file, and
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
from time import sleep

from kind import Acts, Kind, read_kinds

HERE = Path(__file__).parent
OUTCOMES, DOCUMENT = HERE / "outcomes.json", HERE.parent.parent / "docs" / "proof.md"
KINDS = read_kinds(HERE / "kinds.diff")
AT_ONCE, LIMIT_S = 2, 300
ALONE = ("--rehearse", "off", "--audit", "off")
KILLED = (*ALONE, "--snapshot-every", "6", "--faults", "step 12 rank 0 backward: kill")
# The last step before a second node joins is done again by both: a rehearsal never is due.
TWO_NODES = ("--min-nodes", "1", "--max-nodes", "2", "--hang-timeout", "100s")
JOINED = (*TWO_NODES, "--rehearse", "1000", "--audit", "off", "--snapshot-every", "1")
PAUSES_S = 10, 20, 40  # of a step, in which the second node starts
HEAD = """\
# What finds hidden state

`make proof` makes this table: each kind of state outside `State`, where it acts, and
by what it was found: in an undisturbed run of three epochs of six steps with one worker, and with two; without
rehearsals and audits, where a worker is killed in the second epoch, and where a node joins in the first;
and by `elastic-train check` where one worker did not find it (no cell: not played). *named*: the run goes on,
since every result was the same, and a line says what a restart does not bring back. Each has a twin that does
the same rightly, which goes on to its end; a line may name what it only shows.

Of the {early} kinds that act within the first epoch and its end, or never, {found} are found in the
undisturbed run, with one worker or with two.

| kind | acts | one worker | two workers | killed | joined | check |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one kind. one, two: how the recipe ended with so many workers. killed: where one of them
    was killed; joined: where a node joined. check: under check, "" where it was not played.
    twin_one, twin_two: of the twin, "ok" where nothing was said.
    """

    one: str
    two: str
    killed: str
    joined: str
    check: str
    twin_one: str
    twin_two: str

    @property
    def is_found(self) -> bool:
        """In the undisturbed run with one worker, or with two, where one alone is not wrong."""
        return {self.one, self.two} - {"", "ok"} != set()


def play(recipe: str, *options: str, joins: bool = False) -> str:
    """Train it; returns by what it was found, or "ok". joins: a second node, in the first steps."""
    with tempfile.TemporaryDirectory() as folder:
        path, run = Path(folder) / "recipe.py", Path(folder) / "run"
        path.write_text(recipe)
        command = [sys.executable, "-m", "elastic.cli", "recipe.py", "--run-dir", "run", *options]
        with ThreadPoolExecutor() as pool:
            first = pool.submit(_run, command, folder)
            while joins and not first.done() and "generation_started" not in _kinds(run):
                sleep(0.1)
            if joins and not first.done():
                pool.submit(_run, command, folder)
        found = _named(first.result(), run)
        return "" if joins and found == "ok" and "overlapped" not in _kinds(run) else found


def joined(recipe: str) -> str:
    """With a second node in the first epoch, by what that is found."""
    for pause_s in PAUSES_S:
        pause = f"step 5 rank 0 forward: pause {pause_s}s"
        if found := play(recipe, *JOINED, "--faults", pause, joins=True):
            return found
    raise TimeoutError("no second node has joined")


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


def _kinds(run: Path) -> set[str]:
    return {event["event"] for event in _events(run)}


def _events(run: Path) -> list[dict]:
    lines = [line for file in sorted(run.glob("events/*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def _named(ended: subprocess.CompletedProcess[str], run: Path) -> str:
    kinds = _kinds(run)
    said = ended.stdout + ended.stderr
    if ended.returncode == 2:
        return "refused"
    if ended.returncode == 1:
        for kind, name in (
            ("step_differed", "a step done again"),
            ("audit_failed", "audit"),
            ("divergence_detected", "agreement"),
            ("replay_differed", "replay"),
        ):
            if kind in kinds:
                return name
        return "the second start" if "started again" in said else f"error: {said.strip()[-200:]}"
    if ended.returncode != 0:
        return f"exit {ended.returncode}: {said.strip()[-200:]}"
    left = [event for event in _events(run) if event.get("not_restored")]
    return "named: " + ", ".join(left[-1]["not_restored"]) if left else "ok"


def measure(kind: Kind) -> Outcome:
    recipes = kind.recipes
    wrong, twin, two_workers = recipes["wrong"], recipes["twin"], ("--nproc-per-node", "2")
    one = play(wrong)
    return Outcome(
        one=one,
        two=play(wrong, *two_workers),
        killed=play(wrong, *KILLED),
        joined=joined(wrong),
        check=checked(wrong) if one == "ok" else "",
        twin_one=play(twin),
        twin_two=play(twin, *two_workers),
    )


def document(outcomes: dict[str, Outcome]) -> str:
    """docs/proof.md."""
    early = [kind for kind in KINDS if kind.acts in (Acts.STEP, Acts.EPOCH, Acts.NEVER)]
    found = sum(outcomes[kind.name].is_found for kind in early)
    rows = [
        f"| {' | '.join([kind.name, kind.acts.value, *map(_cell, cells)])} |"
        for kind in KINDS
        for of in [outcomes[kind.name]]
        for cells in [(of.one, of.two, of.killed, of.joined, of.check)]
    ]
    return "\n".join([HEAD.format(early=len(early), found=found), *rows, ""])


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
