"""The newest checkpoint is the one that the next restore would take, as far as it is known."""

from hypothesis import given
from hypothesis import strategies as st
from logged import logged

from elastic.observe.run_view import checkpoints_of


def committed(generation, step):
    return logged("checkpoint_committed", float(step), generation, step=step)


def rejected(generation, step):
    return logged("checkpoint_rejected", 0.0, generation, step=step, reason="it is cut off")


def restored(generation, step, source="checkpoint"):
    return logged("restored", 0.0, generation, step=step, source=source)


@st.composite
def stories(draw):
    """Generations of a run in order: each restores, and then commits.

    A restore tries what is stored from the highest step down until one loads, or takes a snapshot
    of this node's memory, before which it tries what is stored above it.
    """
    told, stored, trained = [], set(), 0
    for generation in range(1, draw(st.integers(1, 5)) + 1):
        in_memory = draw(st.integers(0, trained)) if draw(st.booleans()) else None
        step, source = 0, "none"
        for candidate in sorted(stored, reverse=True):
            if in_memory is not None and in_memory >= candidate:
                break
            if draw(st.booleans()):
                step, source = candidate, "checkpoint"
                break
            told.append(rejected(generation, candidate))
        if in_memory is not None and source == "none":
            step, source = in_memory, "snapshot"
        told.append(restored(generation, step, source))
        for _ in range(draw(st.integers(0, 3))):
            step += draw(st.integers(1, 3))
            told.append(committed(generation, step))
            stored.add(step)
        trained = step
    return told


def dumb_newest(told):
    """The last commit of the highest step of which the last that was told is good.

    told: in the order of the story.
    """
    good, commits = {}, {}
    for each in told:
        step = each.event.step
        if each.event.name == "checkpoint_rejected":
            good.pop(step, None)
        elif each.event.name == "checkpoint_committed":
            good[step] = commits[step] = each
        elif each.event.source == "checkpoint":
            good[step] = commits[step]
    return good[max(good)] if good else None


@given(stories(), st.randoms(use_true_random=False))
def test_the_newest_checkpoint_is_what_a_restore_takes(told, shuffled):
    for count in range(len(told) + 1):
        seen = told[:count]
        expected = dumb_newest(seen)
        shuffled.shuffle(seen)
        assert checkpoints_of(seen).newest == expected
