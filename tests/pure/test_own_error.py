"""What a restart may mend is never taken for the program's own error."""

import traceback
from pathlib import Path

import pytest
import torch
from botocore.exceptions import EndpointConnectionError

from elastic.errors import UsageError
from elastic.faults.inject import InjectedFault
from elastic.system.untrusted import decode
from elastic.system.worker_error import BEFORE_THE_LOOP, ErrorPlace
from elastic.worker import own_error

PLACE = ErrorPlace(where="in step 9", resumed=8)


def described(error):
    try:
        raise error
    except BaseException as raised:
        return own_error.describe(raised, raised.__traceback__, PLACE)


def raised_from(error, cause):
    error.__cause__ = cause
    return error


def while_handling(error, earlier):
    error.__context__, error.__suppress_context__ = earlier, True
    return error


@pytest.mark.parametrize(
    "error",
    [
        InjectedFault("injected: step 9 rank 0 backward: raise"),
        OSError(5, "Input/output error"),
        EndpointConnectionError(endpoint_url="http://store"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("[gloo/transport/tcp/pair.cc:525] Read error"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("unable to open shared memory object </torch_1>"),
        RuntimeError("Socket Timeout"),
        raised_from(ValueError("no labels"), ConnectionError("store")),
        while_handling(ValueError("no batch"), OSError("store")),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        UsageError("no"),
        SystemExit(3),
        type("OwnError", (Exception,), {})("of the recipe"),
        type("Refused", (RuntimeError,), {})("a library's"),
    ],
    ids=lambda error: f"{type(error).__name__}-{error}"[:40],
)
def test_what_a_restart_may_mend_is_not_the_programs_own(error):
    """Also where the recipe turns it into an error of another class."""
    assert described(error) is None


@pytest.mark.parametrize(
    "error",
    [
        NameError("name 'x' is not defined"),
        ValueError("expected 3"),
        KeyError("labels"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x64 and 32x10)"),
        RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        ),
        raised_from(ValueError("no labels"), KeyError("labels")),
    ],
    ids=lambda error: f"{type(error).__name__}-{error}"[:40],
)
def test_an_error_of_the_program_is_its_own(error):
    found = described(error)
    assert (found.kind, found.message, found.place) == (type(error).__name__, str(error), PLACE)


def test_its_line_is_the_innermost_of_the_recipe(tmp_path):
    """torch raises below the recipe's function; the line of the call is what the recipe's author
    looks for. Without a traceback there is none.
    """
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import torch\n\ndef f():\n    torch.nn.Linear(2, 3)(torch.ones(1, 5))\n\nf()\n")
    try:
        exec(compile(recipe.read_text(), str(recipe), "exec"), {})
    except RuntimeError as error:
        trace = error.__traceback__.tb_next
        assert traceback.extract_tb(trace)[-1].filename != str(recipe)
        found = own_error.describe(error, trace, BEFORE_THE_LOOP)
    assert Path(found.line) == Path(f"{recipe}:4")
    assert own_error.describe(ValueError("m"), None, BEFORE_THE_LOOP).line == ""


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
