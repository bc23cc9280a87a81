"""The line of the user's own code is found in the traceback of any error."""

from pathlib import Path

import pytest
import torch

from elastic.system.untrusted import decode
from elastic.worker import own_error


def test_the_users_innermost_line_is_found_among_libraries():
    """The library calls a function of the recipe through torch, and refuses what it does."""

    def refuse():
        decode(int, "no number", what="a number")

    module = torch.nn.Module()
    module.forward = refuse
    try:
        module()
    except ValueError as error:
        found = own_error.own_line(error.__traceback__)
    line = refuse.__code__.co_firstlineno + 1
    assert found == f'  at {__file__}:{line}: decode(int, "no number", what="a number")'


def test_an_error_without_a_line_of_the_users_shows_none():
    assert own_error.own_line(None) == ""


def failing_group(**settings):
    torch.distributed.init_process_group("gloo", **settings)


def test_a_process_group_of_the_users_is_known_by_its_traceback(monkeypatch):
    """torch says only which variable it lacks. One that this library opens is no mistake of the
    recipe's, nor is an error that comes from somewhere else.
    """
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK") as raised:
        failing_group()
    assert own_error.opens_group(raised.tb)
    monkeypatch.setattr(own_error, "_LIBRARY", str(Path(__file__).parent))
    assert not own_error.opens_group(raised.tb)
    with pytest.raises(ZeroDivisionError) as raised:
        1 / 0  # noqa: B018
    assert not own_error.opens_group(raised.tb)
