"""What a finished run does not need any more: never a committed file, metrics or an event.

    checkpoints/   attempts that no commit record names, once no writer can commit them any more
    logs/          of generations before the last one that has logs
    rendezvous/    heartbeats and requests of nodes that are gone
    anywhere       drafts of files that were never put in their places

What the run answers from stays: run.json and data.json, uid and lease, events, metrics of every
generation, commit records with what they name, and the versions of the group's state with the
number of its generation, by which a process that wakes up late finds itself fenced.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic.checkpoint.record import SAVE_S, CommitRecord, parse_attempt, parse_step, save_limit_s
from elastic.config.run_dir import OWN_NAMES, OWN_PREFIX

CHECKPOINTS, LOGS, RENDEZVOUS = "checkpoints/", "logs/", "rendezvous/"
FOLDERS = ("checkpoints", "logs", "rendezvous", "events", "lease", "faults")
DRAFT_S = 3600.0  # A draft of this age has lost its writer, which needs it for a moment.

_DRAFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}|\.elastic-[0-9a-f]{32}", re.DOTALL)
_LOG = re.compile(r"logs/([0-9]{1,18})/rank[0-9]+(?:-[0-9]+)?(?:/[0-9]{12})?\.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """name: below the run directory. changed_s: seconds since 1970 by the storage's clock, None
    where it does not tell.
    """

    name: str
    size_bytes: int
    changed_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """One file, and what it was."""

    name: str
    size_bytes: int
    what: str


def leftovers(
    files: Iterable[StoredFile], records: Iterable[CommitRecord], unclear_steps: Iterable[int], now_s: float
) -> list[Leftover]:
    """Of a finished run in which no node trains; sorted by name.

    records: all of the run directory, listed after the files. unclear_steps: of damaged records,
    which may have named any attempt of their steps. now_s: by the storage's clock.
    """
    found = list(files)
    named = {record.payload.rpartition("/")[0] for record in records}
    largest = max((each.size_bytes for each in found), default=0)
    # As in prune.py: a writer stops by itself after one deadline, and a call of its may be on
    # its way then.
    attempt_s = 2 * save_limit_s(SAVE_S, largest)
    ages_s = {each.name: None if each.changed_s is None else now_s - each.changed_s for each in found}
    youngest = _youngest_of_attempts(ages_s)
    last = max((number for each in found if (number := _generation_of_log(each.name)) is not None), default=0)
    kept_steps = set(unclear_steps)
    return [
        Leftover(name=each.name, size_bytes=each.size_bytes, what=what)
        for each in sorted(found, key=lambda each: each.name)
        if (what := _what(each.name, ages_s[each.name], youngest, (named, kept_steps), (last, attempt_s)))
    ]


def _what(
    name: str,
    age_s: float | None,
    youngest: Mapping[str, float],
    kept: tuple[set[str], set[int]],
    limits: tuple[int, float],
) -> str | None:
    """What the file is, if it is not needed."""
    (named, kept_steps), (last, attempt_s) = kept, limits
    if _is_draft(name):
        return "a draft" if age_s is not None and age_s > DRAFT_S else None
    if name.startswith(CHECKPOINTS):
        inner = name.removeprefix(CHECKPOINTS)
        attempt = parse_attempt(inner)
        if attempt is None or attempt[0] in named or parse_step(inner) in kept_steps:
            return None
        return "an attempt that was not committed" if youngest[attempt[0]] > attempt_s else None
    generation = _generation_of_log(name)
    if generation is not None and generation < last:
        return "a log of an earlier generation"
    if name.startswith((f"{RENDEZVOUS}beats/", f"{RENDEZVOUS}requests/")):
        return "of a node that is gone"
    return None


def _youngest_of_attempts(ages_s: Mapping[str, float | None]) -> dict[str, float]:
    """By attempt, the age of what was written there last; 0 where the storage does not tell."""
    found: dict[str, float] = {}
    for name, age_s in ages_s.items():
        if name.startswith(CHECKPOINTS) and (attempt := parse_attempt(name.removeprefix(CHECKPOINTS))):
            found[attempt[0]] = min(found.get(attempt[0], float("inf")), 0.0 if age_s is None else age_s)
    return found


def _generation_of_log(name: str) -> int | None:
    found = _LOG.fullmatch(name)
    return None if found is None else int(found[1])


def _is_draft(name: str) -> bool:
    """Of a file that the run itself writes; a recipe's own files beside run.json are not."""
    folder, _, last = name.rpartition("/")
    found = _DRAFT.fullmatch(last)
    if found is None:
        return False
    of = found["name"]
    return bool(folder) or (of is not None and (of in OWN_NAMES or of.startswith(OWN_PREFIX)))
