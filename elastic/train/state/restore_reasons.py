"""What a restore does not take, why, and what to do, in sentences for people."""

from collections.abc import Sequence

from elastic.config.parent import new_run_from
from elastic.train.state.candidates import Candidate, RejectedState

MOST_LISTED = 5


def listed(rejected: Sequence[RejectedState], run_url: str) -> str:
    """The states that are damaged or must not be used, newest first, each with its reason."""
    ordered = sorted(rejected, key=lambda each: -each.step)
    reasons = [
        f"{'checkpoint' if each.is_stored else 'snapshot'} step={each.step}: {_one_line(each.reason)}"
        for each in ordered[:MOST_LISTED]
    ]
    if len(ordered) > MOST_LISTED:
        reasons.append(f"and {len(ordered) - MOST_LISTED} more")
    return (
        f"{'; '.join(reasons)}. Nothing was changed: elastic-train verify {run_url} reads all checkpoints and lists the damage, "
        "and --fresh would set the run aside and begin a new one"
    )


def does_not_fit(candidate: Candidate, reason: str, run_url: str) -> str:
    """A state that is whole, of other objects than the recipe builds now."""
    kind = "checkpoint" if candidate.is_stored else "snapshot"
    return (
        f"the {kind} of step {candidate.step} does not fit what the recipe builds: {_one_line(reason).rstrip('.')}. "
        "Put the recipe back and give the same command, or begin a new run with the entries that fit: "
        f"{new_run_from(run_url, entries='NAME')}"
    )


def misplaced(names: Sequence[str]) -> str:
    """Tensors of a state that could not be put where they were in their memory."""
    return (
        f"warning: these tensors of the state begin elsewhere in their memory than when it was saved, so that steps may round otherwise than without the restart: {_some(names)}. "
        "Other tensors of the script use the same memory, or load_state_dict has put them into other memory: clone what steps put into the state"
    )


def ignored(settings: Sequence[str], run_url: str) -> str:
    """Settings of an edited recipe, or of a file that it reads, that a resume does not take."""
    return (
        f"warning: the recipe now builds other settings than when the state was saved, and a resume keeps those that were saved: "
        f"{_some(settings)}. To train on with the new ones, begin a new run from this one: "
        f"{new_run_from(run_url)}"
    )


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _one_line(text: str) -> str:
    """Torch's own messages have a line for each parameter."""
    return " ".join(text.split())
