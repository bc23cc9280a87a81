"""Numbers that a loop sets in modules of its State are, in a process that begins at any step, those
that the undisturbed process has; what a forward keeps for itself is not put back.

`play` goes through the moments of a step as the loop does: the body's head, the forward, the body's
tail. A process that begins later builds the modules again.
"""

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import elastic
from elastic.errors import UsageError
from elastic.train.body_changes import ALL_OF_FIRST, BodyChanges
from elastic.train.module_settings import ModuleSettings

STEPS = 6


class Net(nn.Module):
    scale: ClassVar[float] = 1.0

    def __init__(self):
        super().__init__()
        self.drop, self.phase, self.temperature, self.length = nn.Dropout(0.1), "warm", 1.0, None
        self.reached = 0

    def forward(self, x):
        if x > STEPS**STEPS:
            self.reach(x)
        return x

    def reach(self, x):
        self.reached = x

    def cool(self, value):
        self.temperature = value

    def call(self, step):
        self.length = max(step, self.length or 0)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Net()


def seen(net):
    inner = net.inner
    return [inner.drop.p, inner.phase, inner.temperature, inner.scale, vars(net).get("new")]


def play(actions, first=1, saved=None, steps=STEPS, notes=None, late=None):
    """{step: (what the forward sees, what is saved)}. actions: {(step, moment): {name: value}}."""
    Net.scale = 1.0
    net = Outer()
    state = elastic.State(net=net)
    settings = ModuleSettings(state=state)
    settings.put_back(saved or {}, "NEW_RUN")
    body = BodyChanges(state=state, dataset=None, settings=settings)
    body.before_loop()

    def act(step, moment):
        for name, value in actions.get((step, moment), {}).items():
            match name:
                case "p":
                    net.inner.drop.p = value
                case "scale":
                    Net.scale = value
                case "temperature":
                    net.inner.cool(value)
                case "new":
                    net.new = value
                case _:
                    setattr(net.inner, name, value)

    found = {}
    for step in range(first, steps + 1):
        names = body.begin(step)
        act(step, "head")
        names += body.before_loading(step)
        there = seen(net)
        net.inner.call(step)
        act(step, "within")
        set_within = body.after_gradients()
        assert late is not None or not set_within
        if late is not None:
            late += set_within
        act(step, "tail")
        body.read_body()
        assert names == []
        found[step] = there, settings.changed()
        if notes is not None:
            notes[step] = settings.unclear()
    return found


plain = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.sampled_from(["", "ä", "cold"])
names = st.sampled_from(["p", "phase", "temperature", "new"])
moments = st.tuples(st.integers(1, STEPS), st.sampled_from(["head", "tail"]))


@given(
    st.dictionaries(moments, st.dictionaries(names, plain, min_size=1), max_size=5), st.integers(1, STEPS - 1)
)
def test_a_process_that_begins_at_any_step_computes_with_what_the_loop_had_set(actions, step):
    """Any numbers, set in any steps, before or after the forward, also through a method."""
    calm = play(actions)
    resumed = play(actions, first=step + 1, saved=calm[step][1])
    for later in range(step + 1, STEPS + 1):
        assert repr(resumed[later][0]) == repr(calm[later][0])


def test_what_a_forward_keeps_for_itself_and_what_is_as_built_is_not_saved():
    """The length that a cache has reached belongs to the process that has the cache."""
    assert play({})[STEPS][1] == {}
    assert play({(2, "tail"): {"p": 0.5}})[STEPS][1] == {"State.net.inner.drop.p": "0.5"}


def test_what_a_class_of_the_recipe_holds_is_put_back_there():
    """Else a later change of the class would not reach the module."""
    actions = {(1, "head"): {"scale": 0.5}, (4, "head"): {"scale": 0.9}}
    calm = play(actions)
    assert list(calm[2][1].values()) == ["0.5"]
    assert play(actions, first=3, saved=calm[2][1])[5] == calm[5]


@pytest.mark.parametrize("moment", ["head", "tail"])
def test_a_number_that_a_forward_may_set_is_named_where_it_changes_between_two_readings(moment):
    """What no method assigns that a forward calls, as that of a growing network, is the loop's."""
    late = ALL_OF_FIRST + 2
    actions = {(late, moment): {"temperature": 0.5, "p": 0.3, "reached": 5}}
    notes = {}
    saved = play(actions, steps=late + 1, notes=notes)[late + 1][1]
    assert saved == {"State.net.inner.drop.p": "0.3", "State.net.inner.temperature": "0.5"}
    assert notes[late + 1] == ["net.inner.reached"]
    assert notes[late - 1] == []


def test_a_setting_that_a_function_of_a_step_makes_now_and_then_is_named():
    """`if step.number == 3: model.drop.p = 0.5` there. What its first call sets, a cache's length,
    it may make when it is first needed; and what a forward keeps is that of a process.
    """
    actions = {
        (1, "within"): {"phase": "hot"},
        (3, "within"): {"p": 0.5, "reached": 2},
        (4, "head"): {"new": 1},
    }
    late = []
    play(actions, late=late)
    assert late == ["net.inner.drop.p"]


@pytest.mark.parametrize("place", ["State.gone.p", "State.net.inner.dropout.p"])
def test_an_attribute_that_has_no_place_any_more_is_refused(place):
    with pytest.raises(UsageError, match=r"the loop had set .* to 0\.3 when the state was saved"):
        play({}, saved={place: "0.3"})


@pytest.mark.parametrize(("assigned", "named"), [({"temperature"}, ["net.inner.temperature"]), (set(), [])])
def test_a_number_that_the_loop_and_a_forward_set_is_named(assigned, named):
    """As `if self.temperature < 0.5: self.temperature = 0.5` in a forward does: a resume can put
    back neither one. What a forward sets that the body calls is the forward's alone."""
    net = Outer()
    settings = ModuleSettings(state=elastic.State(net=net))
    settings.of_body.add("net.inner.temperature")
    settings.of_forward.add("net.inner.temperature")
    net.inner.temperature = 0.5
    assert settings.changed() == {}
    assert settings.unclear(lambda: frozenset(assigned)) == named
