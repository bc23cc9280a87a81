"""Every random scenario can be read, and is the same for the same seed."""

import pytest
from random_scenario import GATES, Place, draw_scenario
from scenario import Ends, Start, parse


@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("seed", range(50))
def test_a_random_scenario_can_be_read_and_accounts_for_every_start(seed, place):
    text = draw_scenario(seed, place)
    scenario = parse("drawn", text)

    assert text == draw_scenario(seed, place)
    (end,) = [codes for codes in scenario.commands if type(codes).__name__ == "End"]
    starts = sum(c.nodes for c in scenario.commands if isinstance(c, Start)) + text.count("\nagain ")
    assert len(end.codes) + sum(isinstance(c, Ends) for c in scenario.commands) == starts
    assert text.count("\nstands ") == text.count("\nopen ") == len(GATES)


def test_random_scenarios_have_every_kind_of_fault():
    drawn = "".join(draw_scenario(seed, place) for seed in range(100) for place in Place)
    kinds = ["kill worker", "kill node", "kill every node", "terminate node", "pause node", "cut node"]
    kinds += ["deafen node", "mute node", "cut power", "fill volume", "empty newest version", "kill member"]
    kinds += ["flip newest", "truncate newest", "storage answers 500", "storage hangs", "kill uploader"]
    kinds += ["--form sum", "--keep-alive 7", "jump node", "jump-back node"]
    assert [kind for kind in kinds if kind not in drawn] == []
