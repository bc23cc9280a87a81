"""A group that begins again counts its generations on, and keeps what is still true of the old one.

It begins again when a person starts a run that has ended, when another run takes its name, and when
the backend has lost the shared state. All other changes of a group stand in `transitions`.

It does not promise that what a node remembers of a lost state is the newest: each survivor puts
back what it knows, and a state in which something was decided since then stays.
"""

from dataclasses import replace

from elastic.errors import EXIT_COMPLETE
from elastic.rendezvous.group import Group
from elastic.rendezvous.shared_settings import SharedSettings
from elastic.rendezvous.transitions import NEW_RUN, NODE_LOST, RESUME, START


def reopen(group: Group, *, is_new: bool = False) -> Group:
    """A person starts a failed or interrupted run again. A complete run stays complete.

    is_new: the end is that of another run of the same name, whose counts and members go too.
    """
    if group.ended is None or (group.ended.exit_code == EXIT_COMPLETE and not is_new):
        return group
    if is_new:
        return reset(group)
    return _resumed(group)


def reset(group: Group) -> Group:
    """Another run takes over the name of an old one. Only the number of generations goes on.

    If generations were counted from zero again, a process of the old run that wakes up could hold
    the number of a new generation, and the fence would let it through. If the number stayed the
    same, a node of the old run that has not read its end would take this for a lost state, and put
    back the one before.
    """
    return replace(Group(), generation=group.generation + 1, cause=NEW_RUN)


def _resumed(group: Group) -> Group:
    """The same run begins again without any of its nodes; what it has reached stays."""
    return replace(
        Group(),
        generation=group.generation,
        cause=NEW_RUN if group.cause == NEW_RUN else RESUME,
        high_step=group.high_step,
        committed_step=group.committed_step,
        settings=group.settings,
    )


def take_over(group: Group, settings: SharedSettings) -> Group:
    """The first node with these settings comes, and no node of the group is alive."""
    if group.settings is not None and group.settings.run != settings.run:
        group = reset(group)
    elif group.member_ids | group.waiting_ids:
        group = _resumed(group)
    return replace(group, settings=settings)


def last_known_state(group: Group) -> Group:
    """The part of `group` that is still true if the shared state is lost after this poll.

    The generation is over, since its members can no longer find each other there. The members,
    their rank order and the counts go on. Nodes that wait must join again: they may be dead by
    then.
    """
    return replace(
        group,
        open=False,
        waiting=(),
        done=(),
        endpoint=None,
        cause=NODE_LOST if group.open else group.cause,
        reports=(),
    )


def restore_lost_state(group: Group, known: Group) -> Group:
    """`group`, or the state `known` by this node if the shared state was lost and created again
    empty.

    A store that one node serves is lost with that node, and a folder can be deleted. A node that
    starts then finds nothing and creates an empty group, while the surviving members still know the
    last one. Each survivor that reads such a beginning puts its own last known state in its place
    and keeps the nodes that already wait. So no generation number is given twice, and members keep
    their ranks. Any state in which something was formed or decided is newer than what this node
    knows, and stays.
    """
    is_lost = _is_beginning(group) and not _is_beginning(known)
    if not is_lost or known.ended is not None or group.generation > known.generation:
        return group
    if known.settings != group.settings:
        return known  # the nodes that wait there may not join this group
    return replace(known, waiting=group.waiting, reports=group.reports)


def _is_beginning(group: Group) -> bool:
    """Nothing was formed or decided yet."""
    return group.cause == START and not group.open and not group.members and group.ended is None
