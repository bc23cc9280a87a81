"""Each call of a node that asks for something fails once, and nothing takes effect late or twice.

Three nodes of a storm combine their writes. test_rendezvous_backend.py has what a client of each
place to meet makes of a call that fails.
"""

from functools import partial, partialmethod
from itertools import count

import group_storm
import pytest
from group_storm import KEEP_ALIVE_S, Door, Storm

from elastic.rendezvous import group_writer
from elastic.rendezvous.backends.backend import BackendFailed
from elastic.rendezvous.group_writer import granted
from elastic.rendezvous.heartbeat import request_of
from elastic.rendezvous.rendezvous import Rendezvous

CALL_S = 0.02


class FailingDoor(Door):
    """While `before_call` is set, it is called before each call, and the `fails_at`-th of these
    fails. is_lost: it takes effect all the same. is_false: a write that fails answers False.
    """

    fails_at, is_lost, is_false, calls, before_call = 0, False, False, 0, None

    def _call(self, name, *arguments):
        effect = partial(getattr(super(), name), *arguments)
        if (before_call := self.before_call) is None:
            return effect()
        self.before_call = None
        before_call()
        self.clock.sleep(CALL_S)
        self.before_call = before_call
        self.calls += 1
        if self.calls != self.fails_at:
            return effect()
        if self.is_lost:
            effect()
        if self.is_false and name == "compare_and_set":
            return False
        raise BackendFailed("no answer")

    read = partialmethod(_call, "read")
    compare_and_set = partialmethod(_call, "compare_and_set")
    show = partialmethod(_call, "show")
    shown = partialmethod(_call, "shown")


class Place(Storm):
    """While one node calls, slow writers read; they write later."""

    def __init__(self):
        super().__init__(1, 3)
        self.slow_writes = []
        while len(self.training) < 3:
            self.sleep(0.25)

    def requests(self):
        """What takes effect in the group as it is."""
        group = self.group
        found = [(name, request_of(text)) for name, text in self._memory.shown().items()]
        return {name: each for name, each in found if granted(group, {name: each}, dead=set()) != group}

    def read_slowly(self):
        if requests := self.requests():
            value = granted(self.group, requests, dead=set()).to_json()
            self.slow_writes.append((len(self.written), value))

    def write_slowly(self):
        for version, value in self.slow_writes:
            self.open().compare_and_set(version, value)

    def is_told(self, name, act):
        """Whether the node learns that its act failed."""
        machine = self.machines[name]
        machine.is_busy = machine.is_leaving = True
        machine.door.before_call = self.read_slowly
        try:
            act(machine.rendezvous)
        except BackendFailed:
            return True
        finally:
            machine.is_busy, machine.door.before_call = False, None
        return False


ACTS = {
    "give up joining": Rendezvous.leave,
    "withdraw": lambda node: node.withdraw(lambda _generation: False),
    "withdraw, shared": lambda node: node.withdraw(lambda _generation: True),
    "leave": Rendezvous.leave,
    "done": Rendezvous.done,
}


@pytest.fixture(autouse=True)
def _three_nodes_combine_their_writes(monkeypatch):
    monkeypatch.setattr(group_writer, "COMBINES_FROM", 3)
    monkeypatch.setattr(group_storm, "Door", FailingDoor)


def each_call_fails(what, **how):
    """A place, a node, and whether it was told that the call failed, for each of the calls."""
    for fails_at in count(1):
        place = Place()
        name = place.start() if what == "give up joining" else place.training[1]
        if what == "give up joining":
            while name not in place.requests():
                place.sleep(0.01)
        elif what == "leave":
            place.machines[name].is_leaving = True
            ACTS["withdraw"](place.machines[name].rendezvous)
        door = place.machines[name].door
        vars(door).update(how, fails_at=fails_at)
        yield place, name, place.is_told(name, ACTS[what])
        if door.calls < fails_at:
            break
    assert fails_at > 1


@pytest.mark.parametrize("is_false", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("what", [what for what in ACTS if what != "done"])
def test_a_node_that_goes_stays_away_whichever_call_fails(what, is_lost, is_false):
    """It goes as its agent does: where it is told that its withdrawal failed it leaves all the
    same, and after that it is gone. At each of its calls a slow writer reads group and requests.
    """
    for place, name, is_told in each_call_fails(what, is_lost=is_lost, is_false=is_false):
        is_late = what == "leave" and is_told
        if not is_late:
            place.machines[name].rendezvous.leave()
        assert is_told or name not in place.group.member_ids | place.group.waiting_ids
        del place.machines[name]
        place.write_slowly()
        place.sleep(2 * KEEP_ALIVE_S if is_late else 0.0)
        assert name not in place.group.member_ids | place.group.waiting_ids | place.requests().keys()


@pytest.mark.parametrize("is_false", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_run_is_complete_whichever_call_of_a_done_node_fails(is_lost, is_false):
    """It looks at the group and says again that it is done, as its agent does."""
    for place, name, is_told in each_call_fails("done", is_lost=is_lost, is_false=is_false):
        if is_told:
            place.machines[name].rendezvous.watch()
            place.machines[name].rendezvous.done()
        place.write_slowly()
        for other in set(place.machines) - {name}:
            place.machines[other].rendezvous.done()
        assert place.group.ended is not None and place.group.ended.exit_code == 0
