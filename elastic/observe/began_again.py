"""A run that may not have the result of an undisturbed run says so where it ends."""

from elastic.events import LoggedByRank, ReplayDiffered, Restored
from elastic.observe.logged_event import Events, last, of_kind


def told_at_the_end(events: Events, steps: int) -> str:
    """What the last line adds; empty for nothing. steps: that were trained in all."""
    replays = "".join(
        f"; step {each.event.step} gave another result when it was done again, so that this need not be the result of an undisturbed run"
        for each in of_kind(events, ReplayDiffered)[-1:]
    )
    began = last(events, Restored)
    if began is not None and began.event.step == steps:
        replays += (
            "; the last process went on after the last step, so that it had no step to train: what steps leave outside the State, such as the last output in an"
            " attribute or in a hook's dict, was not there for the code after the loop"
        )
    return replays


def logged_by_rank(events: Events) -> list[str]:
    """Names in the metrics whose numbers are those of rank 0 alone."""
    return list(dict.fromkeys(name for each in of_kind(events, LoggedByRank) for name in each.event.names))
