"""Parameters that the loop moves are refused: a resume gives states back by places and names."""

import pytest
import torch
from steps import ALONE, CLASSES, FEATURES, steps
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from elastic.errors import UsageError
from elastic.train.parameter_marks import marks_of
from elastic.train.parameter_places import ParameterPlaces
from elastic.train.state import State


def check_places(places, state, step):
    parts = state.parts()
    places.check(step, parts, marks_of(list(parts.owned.values())))


def net_of():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
    )


def in_two_groups(net, optimizer=torch.optim.AdamW):
    return optimizer([{"params": list(net[0].parameters())}, {"params": list(net[1:].parameters())}], lr=0.01)


def swap_between_groups(net, optimizer):
    one, other = (group["params"] for group in optimizer.param_groups)
    one[0], other[0] = other[0], one[0]


def move_to_another_group(net, optimizer):
    one, other = (group["params"] for group in optimizer.param_groups)
    one.append(other.pop())


def move_over_the_border(net, optimizer):
    one, other = (group["params"] for group in optimizer.param_groups)
    one.append(other.pop(0))


def reverse_groups(net, optimizer):
    optimizer.param_groups.reverse()


def reverse_a_group(net, optimizer):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][::-1]


def sort_a_group(net, optimizer):
    optimizer.param_groups[1]["params"].sort(key=lambda p: p.numel())


def swap_in_modules(net, optimizer):
    net[0].weight, net[1].weight = net[1].weight, net[0].weight


def swap_modules(net, optimizer):
    net[0], net[1] = net[1], net[0]


MOVES = [
    (swap_between_groups, r"1\.weight stands at AdamW\.param_groups\[0\]\['params'\]\[0\], where net\.0\.w"),
    (move_to_another_group, r"2\.bias stands at AdamW\.param_groups\[0\]\['params'\]\[2\], where net\.1\.w"),
    (move_over_the_border, r"1\.weight stands at .*\[0\]\['params'\]\[2\].* of param_groups\[1\], stood"),
    (reverse_groups, r"1\.weight stands at AdamW\.param_groups\[0\]\['params'\]\[0\], where net\.0\.weight"),
    (reverse_a_group, r"0\.bias stands at AdamW\.param_groups\[0\]\['params'\]\[0\], where net\.0\.weight"),
    (sort_a_group, r"2\.bias stands at AdamW\.param_groups\[1\]\['params'\]\[0\], where net\.1\.weight"),
    (swap_in_modules, r"1\.weight stands at AdamW\.param_groups\[0\]\['params'\]\[0\], where net\.0\.w"),
    (swap_modules, r"1\.weight stands at AdamW\.param_groups\[0\]\['params'\]\[0\], where net\.0\.weight"),
]


@pytest.mark.parametrize(("move", "words"), MOVES, ids=lambda each: getattr(each, "__name__", ""))
def test_a_parameter_that_the_loop_moves_is_refused_by_name(move, words):
    """After a resume the moments, or the learning rate, would be those of another parameter of the
    same shape, or torch raises a bare error where the shapes differ."""
    net = net_of()
    optimizer = in_two_groups(net)
    state = State(net=net, optimizer=optimizer)
    coming = steps(ALONE, state)
    next(coming).mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))
    optimizer.step()
    move(net, optimizer)
    with pytest.raises(UsageError, match=rf"step [12]: net\.{words}.*leave them where they are"):
        next(coming).mean_loss(lambda batch: F.cross_entropy(net(batch.data[0]), batch.data[1]))


def test_what_is_moved_at_the_end_of_a_step_is_refused_before_its_state_is_kept():
    """Else a process that takes over there would never have seen it move."""
    net = net_of()
    state = State(net=net, optimizer=torch.optim.AdamW(net.parameters()))
    places = ParameterPlaces(state)
    check_places(places, state, 5)
    swap_modules(net, None)
    with pytest.raises(UsageError, match=r"step 5: net\.1\.weight stands at"):
        check_places(places, state, 5)


def test_a_group_that_gets_more_parameters_is_refused_with_how_to_add_a_group():
    """A load would find a group of another length."""
    net = net_of()
    optimizer = torch.optim.AdamW(net[:2].parameters())
    places = ParameterPlaces(State(net=net, optimizer=optimizer))
    optimizer.param_groups[0]["params"].append(net[2].weight)
    with pytest.raises(
        UsageError, match=r"step 3: the loop has put net\.2\.weight into a group of AdamW.*add_param_group"
    ):
        places.check_groups(3)


@pytest.mark.parametrize("has_state", [False, True])
def test_a_group_that_the_loop_deletes_is_refused(has_state):
    """With a state torch's state_dict raises a bare KeyError then, in the middle of a save; without
    one the process that resumes finds a group too many."""
    net = net_of()
    optimizer = in_two_groups(net)
    if has_state:
        net(torch.ones(2, FEATURES)).sum().backward()
        optimizer.step()
    places = ParameterPlaces(State(net=net, optimizer=optimizer))
    del optimizer.param_groups[0]
    with pytest.raises(
        UsageError, match=r"step 1: the loop has taken net\.0\.weight out of the groups of Ad"
    ):
        places.check_groups(1)


def tie_parameters(net):
    net[1].weight = net[0].weight


def tie_memory(net):
    net[1].weight.data = net[0].weight.data


def tie_a_part(net):
    net[2].weight.data = net[0].weight.data[:CLASSES]


@pytest.mark.parametrize("tie", [tie_parameters, tie_memory, tie_a_part])
def test_weights_that_the_loop_ties_are_refused(tie):
    """The script builds them apart, and the next update would change one and not the other."""
    net = net_of()
    state = State(net=net, optimizer=torch.optim.SGD([net[0].weight], lr=0.1))
    places = ParameterPlaces(state)
    tie(net)
    with pytest.raises(UsageError, match=r"step 2: net\.[12]\.weight shares the memory of net\.0\.weight"):
        check_places(places, state, 2)


def test_weights_that_the_loop_unties_are_refused():
    """The script builds them as one."""
    net = net_of()
    net[1].weight = net[0].weight
    state = State(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    places = ParameterPlaces(state)
    net[1].weight = nn.Parameter(net[0].weight.detach().clone())
    with pytest.raises(
        UsageError, match=r"step 2: net\.1\.weight no longer shares the memory of net\.0\.weig"
    ):
        check_places(places, state, 2)


def test_what_a_loop_may_do_with_groups_and_parameters():
    """New groups, a new module with its parameters in the old places, memory that is replaced, also
    by parts of one vector, and weights of an average that change places with those of the model for
    a while."""
    net, average = net_of(), net_of()
    optimizer = in_two_groups(net)
    state = State(net=net, average=average, optimizer=optimizer)
    places = ParameterPlaces(state)

    def check():
        places.check_groups(4)
        check_places(places, state, 4)

    extra = nn.Parameter(torch.ones(1))
    net.register_parameter("extra", extra)
    optimizer.add_param_group({"params": [extra]})
    check()
    net[2] = nn.Linear(FEATURES, CLASSES)
    optimizer.param_groups[1]["params"][2:] = list(net[2].parameters())
    check()
    for one, other in zip(net[:2].parameters(), average[:2].parameters(), strict=True):
        one.data, other.data = other.data, one.data
    check()
    average[0], average[1] = average[1], average[0]  # no optimizer has them
    check()
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    check()
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(net.parameters()), net.parameters())
    check()
