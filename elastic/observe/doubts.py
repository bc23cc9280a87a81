"""What makes a run's result doubtful is shown, and said where the run ends: steps and states that
differed, and variables that a restart did not bring back.
"""

from dataclasses import dataclass

from elastic import events as kinds
from elastic.observe.generations import NODE_LOST, REHEARSAL
from elastic.observe.logged_event import Events, last, of_kind
from elastic.proof.evidence import roots

MOST_NAMES = 3  # variables in the last line
_FAULTS = ("failure", NODE_LOST, "resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSteps:
    """Steps that were done twice, by other workers. alike: those with the same result twice."""

    count: int
    alike: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """The ranks' states differed after a step.

    node: the wrong one, or one of several suspects; None if it is not known or no
    machine was. verdict: machine or recipe; None while the step was not done again.
    """

    step: int
    node: str | None
    entry: str
    verdict: str | None


def told_at_the_end(events: Events, steps: int) -> str:
    """What the last line adds; empty for nothing. steps: that were trained in all."""
    replays = "".join(
        f"; step {each.event.step} gave another result when it was done again, so that this need not be the result of an undisturbed run"
        for each in of_kind(events, kinds.ReplayDiffered)[-1:]
    )
    if any(each.event.accepted for each in of_kind(events, kinds.StepDiffered)):
        replays += "; a step that was done again differed, and --accept took what came then"
    names = roots(not_restored(events))
    if names and any(each.event.cause in _FAULTS for each in of_kind(events, kinds.GenerationStarted)):
        replays += f"; a restart did not bring back {', '.join(names[:MOST_NAMES])} (report says more)"
    began = last(events, kinds.Restored)
    if began is not None and began.event.step == steps:
        replays += (
            "; the last process went on after the last step, so that it had no step to train: what steps leave outside the State, such as the last output in an"
            " attribute or in a hook's dict, was not there for the code after the loop"
        )
    return replays


def not_restored(events: Events) -> dict[str, str]:
    """Variables of the recipe that a restart did not bring back, each as it was found last."""
    found: dict[str, str] = {}
    for each in events:
        if isinstance(each.event, kinds.Overlapped | kinds.Rehearsed):
            found |= each.event.not_restored
    return found


def compared(events: Events, kind: type[kinds.Rehearsed] | type[kinds.Overlapped]) -> ComparedSteps:
    found = [each.event for each in of_kind(events, kind)]
    alike = sum(each.verdict == "alike" for each in found)
    starts = of_kind(events, kinds.GenerationStarted)
    rehearsals = {each.generation for each in starts if each.event.cause == REHEARSAL}
    ended = [  # the run, which no other event tells
        each
        for each in of_kind(events, kinds.StepDiffered)
        if not each.event.accepted and (each.generation in rehearsals) == (kind is kinds.Rehearsed)
    ]
    seconds = sum(each.seconds for each in found)
    return ComparedSteps(count=len(found) + len(ended), alike=alike, seconds=seconds)


def divergences(events: Events) -> list[Divergence]:
    """One for each node that was wrong; differences without a verdict come last."""
    found, judged = list[Divergence](), set[int]()
    for each in of_kind(events, kinds.DivergenceJudged):
        step, entry, verdict = each.event.step, each.event.entry, each.event.verdict
        judged.add(step)
        found += [Divergence(step, node, entry, verdict) for node in each.event.nodes or (None,)]
    detected = of_kind(events, kinds.DivergenceDetected)
    unjudged = (each.event for each in detected if each.event.step not in judged)
    return found + [Divergence(each.step, None, each.entry, None) for each in unjudged]
