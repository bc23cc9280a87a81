"""A fault of the plan that struck nothing is named where the run ends, with why it may not have.

A drill whose fault never happened proves nothing, and its run looks like one that withstood it.
"""

from collections.abc import Sequence

from elastic.faults.plan import (
    AtIntervals,
    AtNode,
    AtRendezvous,
    AtRestore,
    AtSave,
    AtStep,
    Fault,
    Trigger,
)

_NAMED = 6


def told_at_the_end(faults: Sequence[Fault], last_step: int) -> list[str]:
    """A line for each, of a run that is complete. faults: those of which none was injected."""
    lines = [f"no fault struck: {fault.text} ({_reason(fault.trigger, last_step)})" for fault in faults]
    others = [f"no fault struck of {len(lines) - _NAMED} more lines of the plan"] if lines[_NAMED:] else []
    return lines[:_NAMED] + others


def _reason(trigger: Trigger, last_step: int) -> str:
    match trigger:
        case AtStep(step=step) | AtNode(step=step) | AtSave(step=step) if step > last_step:
            return f"the run ended after step {last_step}"
        case AtStep(point="backward"):
            return (
                "no such point was reached: a step whose gradients are made by hand has none, and so has a rank or a step that"
                " was not trained with this plan; forward, mid-sum and optimizer are in each step"
            )
        case AtStep(point="snapshot" | "after-snapshot"):
            return "no such point was reached: there was no snapshot after that step; --snapshot-every 1 takes one after each"
        case AtStep():
            return "no such point was reached: no such rank trained that step with this plan"
        case AtNode():
            return "no such point was reached: no such node finished that step or a later one with this plan"
        case AtSave():
            return "no such point was reached: that step was not saved; --save-every says which are"
        case AtRestore() | AtRendezvous():
            return (
                "no such point was reached: that generation did not come with this plan, or had no such place"
            )
        case AtIntervals():
            return "the run ended before its first time, or no such process was running then"
