"""The methods of a run go on in the groups in which the ranks met when they left the loop."""

from types import SimpleNamespace

from elastic.train.loop.ends import LoopEnd
from elastic.train.run import Run


class Groups:
    pass


class LeftLoop:
    def __init__(self, groups):
        self.parts = SimpleNamespace(groups=groups)


def test_ranks_meet_in_the_groups_of_the_loop_that_was_left():
    """The groups of the start are closed then; with nccl, a closed group is an error."""
    run, first, fresh = object.__new__(Run), Groups(), Groups()
    run._groups, run._loop_end, run._error = first, None, None
    assert run._current_groups is first
    run._loop_end = LoopEnd(LeftLoop(fresh), lambda: None)
    assert run._current_groups is fresh
