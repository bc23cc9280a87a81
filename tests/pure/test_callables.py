"""Through every wrapper that recipes use, the functions of the recipe's own are found."""

import contextlib
import functools

import pytest
import torch
from torch import nn

from elastic.train.callables import bound_by, code_key, layers, unwrapped, wrapped_by


def plain(x=0):
    return x


def with_wraps(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class Wrapping:
    """A decorator in a class; `__call__` is what runs."""

    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self):
        raise AssertionError("nothing is called")


class Kinds:
    def method(self):
        raise AssertionError("nothing is called")

    @torch.no_grad()
    def decorated(self):
        raise AssertionError("nothing is called")

    @staticmethod
    def of_no_object():
        raise AssertionError("nothing is called")

    @classmethod
    def of_class(cls):
        raise AssertionError("nothing is called")

    @property
    def read(self):
        raise AssertionError("nothing is called")

    @read.setter
    def read(self, value):
        raise AssertionError("nothing is called")

    @functools.cached_property
    def read_once(self):
        raise AssertionError("nothing is called")

    part = functools.partialmethod(method)

    def __call__(self):
        raise AssertionError("nothing is called")

    def __getattr__(self, name):
        raise AssertionError("nothing is asked")


class Net(nn.Module):
    def forward(self, x):
        raise AssertionError("nothing is called")


def of_class(name):
    return vars(Kinds)[name]


CALLABLES = {
    "plain": (plain, "plain"),
    "lambda": (lambda: None, "<lambda>"),
    "wraps": (with_wraps(plain), "plain"),
    "no_grad": (torch.no_grad()(plain), "plain"),
    "inference_mode": (torch.inference_mode()(plain), "plain"),
    "autocast": (torch.autocast("cpu")(plain), "plain"),
    "vmap": (torch.vmap(plain), "plain"),
    "compiled": (torch.compile(plain), "plain"),
    "compiled module": (torch.compile(Net()), "Net.forward"),
    "module": (Net(), "Net.forward"),
    "partial": (functools.partial(plain, 1), "plain"),
    "partial of partial of no_grad": (
        functools.partial(functools.partial(torch.no_grad()(plain), 1)),
        "plain",
    ),
    "cache": (functools.cache(plain), "plain"),
    "lru_cache": (functools.lru_cache(maxsize=3)(plain), "plain"),
    "singledispatch": (functools.singledispatch(plain), "plain"),
    "context manager": (contextlib.contextmanager(plain), "plain"),
    "object that wraps": (Wrapping(plain), "plain"),
    "bound method": (Kinds().method, "Kinds.method"),
    "bound decorated method": (Kinds().decorated, "Kinds.decorated"),
    "bound class method": (Kinds.of_class, "Kinds.of_class"),
    "callable object": (Kinds(), "Kinds.__call__"),
    "static method": (of_class("of_no_object"), "Kinds.of_no_object"),
    "class method": (of_class("of_class"), "Kinds.of_class"),
    "property": (of_class("read"), "Kinds.read"),
    "cached property": (of_class("read_once"), "Kinds.read_once"),
    "partial method": (of_class("part"), "Kinds.method"),
    "compiled method": (torch.compile(Kinds().method), "Kinds.method"),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_the_function_inside_a_wrapper_is_found_and_nothing_is_called(kind):
    thing, name = CALLABLES[kind]
    assert name in {each.__qualname__ for each in unwrapped(thing) if each.__code__.co_filename == __file__}


@pytest.mark.parametrize("thing", [None, 3, "text", [plain], {"a": plain}, Net, Kinds, torch.ones(2), print])
def test_what_is_no_callable_of_python_has_no_function(thing):
    """A class is no function either: its methods may run later, or never."""
    assert unwrapped(thing) == []


def test_both_functions_of_a_property_count():
    assert [each.__code__.co_argcount for each in wrapped_by(of_class("read"))] == [1, 2]


def test_a_wrapper_around_itself_ends():
    def again():
        raise AssertionError("nothing is called")

    again.__wrapped__ = again
    assert layers(again) == [again]


def test_what_a_call_has_at_hand_is_given_with_the_names_of_closures():
    teacher = object()
    kinds = Kinds()

    def function(x, y=teacher, *, z=3):
        return teacher, unset, x, y, z

    assert ("teacher", teacher) in bound_by(function)
    assert {("", teacher), ("", 3)} <= set(bound_by(function))
    assert list(bound_by(functools.partial(plain, 1, x=2))) == [("", 1), ("", 2)]
    assert [value is kinds for _, value in bound_by(kinds.method)] == [True]
    assert "unset" not in dict(bound_by(function))
    unset = 0
    assert dict(bound_by(function))["unset"] == unset


def test_functions_of_the_same_lines_have_one_key_and_others_another():
    """A recipe makes its function anew in each step; partials and decorators share their type."""
    made = [functools.partial(torch.no_grad()(lambda: 1), number) for number in range(3)]
    assert len({code_key(each) for each in made}) == 1
    keys = {code_key(wrap(each)) for wrap in (functools.partial, with_wraps) for each in (plain, with_wraps)}
    assert len(keys) == 4
    assert code_key(print) == code_key(len)
