"""A run that may not have the result of an undisturbed run says so where it ends."""

from dataclasses import dataclass

from elastic.events import (
    DrawnWithoutSeed,
    LoggedByRank,
    OrderedByAddress,
    ReplayDiffered,
    Restored,
    UnsavedVariables,
    WorldSizeRead,
)
from elastic.observe.logged_event import Events, last, of_kind

_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaved:
    """Variables that no State saves; first those on which the result may depend.

    changing: the loop changes them. after_loop: the loop sets them, and the script reads them after
    it. files: a step read them, and an earlier one had written them. by_loading: numbers of the
    dataset or of collate; each process has its own. unreadable: what could not be looked at.
    """

    changing: list[str]
    after_loop: list[str]
    files: list[str]
    by_loading: list[str]
    unreadable: list[str]


def unsaved(events: Events) -> Unsaved:
    found = [each.event for each in of_kind(events, UnsavedVariables)]
    return Unsaved(
        changing=list(dict.fromkeys(name for each in found for name in each.changing)),
        after_loop=list(dict.fromkeys(name for each in found for name in each.after_loop)),
        files=list(dict.fromkeys(name for each in found for name in each.files)),
        by_loading=list(dict.fromkeys(name for each in found for name in each.by_loading)),
        unreadable=list(dict.fromkeys(name for each in found for name in each.unreadable)),
    )


def began_again(events: Events) -> list[str]:
    """Variables of the loop that no State saves, if any process went on from a step's state.

    The loop is looked at now and then alone: they may have changed before they were found.
    """
    found = unsaved(events)
    return sorted({*found.changing, *found.by_loading}) if _has_resumed(events) else []


def told_at_the_end(events: Events, steps: int) -> str:
    """What the last line adds; empty for nothing. steps: that were trained in all."""
    replays = "".join(
        f"; step {each.event.step} gave another result when it was done again, so that this need not be the result of an undisturbed run"
        for each in of_kind(events, ReplayDiffered)[-1:]
    )
    if files := _read_again(events):
        replays += f"; a step read the file {shown(files)}, which may have been of a later step than the state that the run went on from"
    if names := began_again(events):
        it = "it" if len(names) == 1 else "them"
        replays += (
            f"; at a restart {shown(names)} began again as at the top of the script, since no State saves {it}: the result is that of an"
            f" undisturbed run only where it does not depend on {it}"
        )
    if late := _read_later(events):
        replays += f"; {shown(late)}, which the script reads after the loop, {'has' if len(late) == 1 else 'have'} only what the steps since the restart have set"
    began = last(events, Restored)
    if began is not None and began.event.step == steps:
        replays += (
            "; the last process went on after the last step, so that it had no step to train: what steps leave outside the State, such as the last output in an"
            " attribute or in a hook's dict, was not there for the code after the loop"
        )
    if places := asked_for_workers(events):
        replays += (
            f"; the recipe asks for the number of workers, or computes with a rank, at {shown(places)}: another number gives this result only where it does not depend"
            " on that"
        )
    if places := ordered_by_address(events):
        replays += f"; the recipe orders or computes by addresses in memory at {shown(places)}: another process gives this result only where it does not depend on that"
    if places := drawn_without_seed(events):
        replays += f"; the recipe draws without a seed at {shown(places)}: another process gives this result only where it does not depend on that"
    return replays


def asked_for_workers(events: Events) -> list[str]:
    """Places in the recipe's text, as it was read last."""
    found = last(events, WorldSizeRead)
    return [] if found is None else found.event.places


def ordered_by_address(events: Events) -> list[str]:
    """Places in the recipe's text, as it was read last."""
    found = last(events, OrderedByAddress)
    return [] if found is None else found.event.places


def drawn_without_seed(events: Events) -> list[str]:
    """Places in the recipe's text, as it was read last, and in calls since then."""
    found: dict[str, str] = {}  # by file and line
    for each in of_kind(events, DrawnWithoutSeed):
        known = found if each.event.is_more else {}
        found = known | {place.partition(" ")[0]: place for place in each.event.places}
    return [*found.values()]


def logged_by_rank(events: Events) -> list[str]:
    """Names in the metrics whose numbers are those of rank 0 alone."""
    return list(dict.fromkeys(name for each in of_kind(events, LoggedByRank) for name in each.event.names))


def _read_again(events: Events) -> list[str]:
    """Files of earlier steps, if a process went on from a step's state."""
    return unsaved(events).files if _has_resumed(events) else []


def _read_later(events: Events) -> list[str]:
    """Variables that only some steps set, if a process went on from a step's state."""
    return unsaved(events).after_loop if _has_resumed(events) else []


def _has_resumed(events: Events) -> bool:
    """Whether any process went on from a step's state."""
    return any(each.event.step for each in of_kind(events, Restored))


def shown(names: list[str]) -> str:
    """The first few, and how many more there are."""
    others = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{others}"
