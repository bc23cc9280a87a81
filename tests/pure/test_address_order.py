"""Sets whose elements lie in them by their addresses are refused where a recipe iterates them."""

import dis
import sys
from dataclasses import dataclass
from pathlib import Path
from re import sub

import pytest
import torch

from elastic.train.address_hash import kind_of
from elastic.train.address_order import (
    _CALLS,
    _named,
    _named_by_call,
    _numbers_by_call,
    _span,
    iterated,
    orders_in,
)
from tests.pure import test_loop_memory as loops

NOISE = "each.data.add_(torch.randn_like(each))"
ITERATED = {
    "decay is a set of parameters": f"""
        decay = {{p for p in model.parameters() if p.ndim > 1}}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            for each in decay:
                {NOISE}
        """,
    "chosen is a set of modules": f"""
        chosen = set(model.modules())
        def noise():
            for module in chosen:
                for each in module.parameters(recurse=False):
                    {NOISE}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            noise()
        """,
    "noise.layers is a set of modules": f"""
        class Noise:
            def __init__(self):
                self.layers = frozenset(model.children())
            def __call__(self):
                return [{NOISE} for layer in self.layers for each in layer.parameters()]
        noise = Noise()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            noise()
        """,
    "clipped is a set of parameters": """
        clipped = {*model.parameters()}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            torch.nn.utils.clip_grad_norm_(clipped, 1.0)
        """,
    "views is a set of tuples with functions": """
        views = {(torch.neg, 0.5), (torch.tanh, 0.3), (torch.sin, 0.7)}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            for view, strength in views:
                model[0].weight.data.add_(strength * view(torch.randn(4, 4)))
        """,
    "given is a set of parameters": f"""
        given = {{*model.parameters()}}
        def noise(those):
            for each in those:
                {NOISE}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            noise(given)
        """,
    "passed is a set of modules": f"""
        class Trainer:
            def noise(self, *, modules):
                for module in modules:
                    for each in module.parameters(recurse=False):
                        {NOISE}
            def all(self, those):
                self.noise(modules=those)
        trainer, passed = Trainer(), set(model.children())
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            trainer.all(
                passed)
        """,
    "names is a set of functions": """
        names = {torch.relu, torch.tanh}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            for each in [*names]:
                model[0].weight.data.copy_(each(model[0].weight.data))
        """,
    "left is a set of functions": """
        left = {torch.relu, torch.tanh}
        def noise():
            model[0].weight.data.copy_(left.pop()(model[0].weight.data))
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            noise()
        """,
    "dataset.views is a set of functions": """
        class Data(torch.utils.data.Dataset):
            def __init__(self):
                self.views = {torch.neg, torch.tanh}
            def __getitem__(self, index):
                x = torch.ones(4)
                for view in self.views:
                    x = view(x)
                return x
        class Step:
            def mean_loss(self, function): pass
        for step in run_steps(Data(), model=model, optimizer=optimizer):
            step.mean_loss(lambda batch: model(batch).mean())
        """,
}
ITERATED |= {
    "limited is a set of parameters": """
        limited, limit = set(model.parameters()), 1.0
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            torch.nn.utils.clip_grad_norm_(limited, limit)
        """,
    "layers is a set of modules": """
        layers = set(model.children())
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            nn.Sequential(*layers)
        """,
    "touched is a set of parameters": f"""
        def noise(touched, scale):
            for each in touched:
                {NOISE}
        touched = set(model.parameters())
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            noise(touched, 0.1)
        """,
}
FINE = {
    "asked beside a method of another class with the name of its own": """
        class Meter:
            total = 0.0
            def add(self, values):
                for v in values: self.last = v
        meter, slow = Meter(), set(model[0].parameters())
        def note(p):
            slow.add(p)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            meter.add([1.0])
            note(model[0].weight)
            n = sum(1 for p in model.parameters() if p in slow)
        """,
    "asked beside an argument with its name, which is a list": """
        params = set(model[0].parameters())
        def norm_of(params):
            for p in params:
                p.detach().norm()
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            norm_of(list(model.parameters()))
            n = [name for name, p in model.named_parameters() if p in params]
        """,
    "asked beside a list of a function with its name": """
        frozen = set(model[0].parameters())
        def report():
            frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
            for n in frozen:
                str(n)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            report()
            k = [p for p in model.parameters() if p not in frozen]
        """,
    "given to a function that asks for its elements": """
        frozen = {*model.parameters()}
        def decay(those, but):
            for p in those:
                if p not in but:
                    p.data.mul_(0.9)
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            decay(model.parameters(), frozen)
        """,
    "sorted where it is given": """
        given = {*model.parameters()}
        def decay(those):
            for p in those:
                p.data.mul_(0.9)
        def in_order(those):
            return [p for p in model.parameters() if p in those]
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            decay(in_order(given))
        """,
    "asked for its elements": """
        frozen = set(model.parameters())
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            for p in model.parameters():
                if p in frozen:
                    p.data.mul_(0.9)
        """,
    "a dict, which has the order of its making": """
        rates = {p: 0.1 for p in model.parameters()}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            for p, rate in rates.items():
                p.data.mul_(1 - rate)
        """,
    "strings, whose hash is that of all processes": """
        names = {name for name, _ in model.named_parameters()}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            for name in names:
                model.get_parameter(name).data.mul_(0.9)
        """,
    "one element": """
        head = {model[2]}
        for step in run_steps(model=model, optimizer=optimizer):
            update()
            for module in head:
                module.weight.data.mul_(0.9)
        """,
}


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("what", ITERATED)
def test_a_set_that_iterates_by_addresses_is_refused_by_name(what, form):
    """In the loop, in a function, in an attribute, and where torch's function iterates it."""
    refused, _, _ = loops.outcome(ITERATED[what], form=form)
    assert refused.startswith(what), refused
    assert "Write a list" in refused


@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("habit", FINE)
def test_what_has_an_order_or_is_not_iterated_is_left_alone(habit, form):
    assert loops.outcome(FINE[habit], form=form)[0] == ""


def test_what_lies_in_a_set_by_its_address_is_told_by_its_hash():
    class Own:
        pass

    class Hashed:
        def __hash__(self):
            return 1

    assert kind_of({Own(), Own()}) == "Own objects"
    assert kind_of({int, float}) == "classes"
    assert kind_of({Own(), int}) == "objects"
    assert kind_of({Hashed(), Hashed()}) is None
    assert kind_of({1, "a"}) is None
    assert kind_of({Own()}) is None


def test_what_lies_in_a_set_by_the_address_of_a_part_is_told_as_well():
    @dataclass(frozen=True)
    class View:
        name: str
        make: object

    class ByHand:
        def __hash__(self):
            return id(self) // 16

    assert kind_of({("a", torch.neg), ("b", 1)}) == "tuples with functions"
    assert kind_of({frozenset({int}), frozenset({"a"})}) == "frozensets with classes"
    assert kind_of({(1, (2, len)), (1, (2, 3))}) == "tuples with tuples with functions"
    assert kind_of({[].append, "a"}) == "functions"
    assert kind_of({View("a", "neg"), View("b", "neg")}) is None
    assert kind_of({View("a", torch.neg), View("b", "neg")}) == "View objects"
    assert kind_of({ByHand(), ByHand()}) == "ByHand objects"
    assert kind_of({float("nan"), 1.0}) == "values with nan"
    assert kind_of({("a", 1.5, b"x", Path("p")), ("b",)}) is None


def test_none_has_an_address_for_its_hash_before_python_3_12():
    is_by_address = sys.version_info < (3, 12)
    assert kind_of({"a", None}) == ("values with None" if is_by_address else None)
    assert kind_of({("a", None), ("b", 1)}) == ("tuples with None" if is_by_address else None)


def test_the_names_that_code_iterates_are_found_in_the_functions_inside_it_too():
    def outer(a, b, c, d):
        for x in a:
            c.add(x)
        found = sum(b)
        return found, lambda: [y + 1 for y in d.parts]

    assert iterated(outer.__code__) >= {"a", "b", "parts"}

    def asks(c, x):
        return x in c, len(c)

    assert "c" not in iterated(asks.__code__)

    def asks_beside(c, x, y):
        return list(x) if y in c else y

    assert "c" not in iterated(asks_beside.__code__)


def test_names_that_are_iterated_are_found_beside_other_variables_too():
    """Python 3.13 and 3.14 load two variables, or store one and load one, in one instruction."""

    def both(a, s, k):
        chosen = set(a)
        for x in chosen:
            x.add(k)
        for x, y in zip(a, s, strict=True):
            x.add(y)
        return torch.stack(k, chosen)

    assert iterated(both.__code__) >= {"chosen", "a", "s", "k"}

    def popped(a):
        left = set(a)
        return left.pop()

    assert iterated(popped.__code__) == {"left"}


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("f(*s)", {"s"}),
        ("f(x, *s)", {"s"}),
        ("f(*s, k=x)", {"s"}),
        ("f(*s, **x)", {"s"}),
        ("nn.f(*s.parts, k=x)", {"parts"}),
        ("s.f(*t, **x)", {"t"}),
        ("f(**x)", set()),
        ("f(*g(x), k=s)", set()),
        ("f(x, 1, *t, k=s)", {"t"}),
    ],
)
def test_what_a_call_unpacks_is_iterated_and_nothing_beside_it(call, found):
    space: dict = {}
    exec(f"def one(x, s, t):\n    {call}\ndef all(x):\n    s = t = x\n    {call}", space)
    assert iterated(space["one"].__code__) == iterated(space["all"].__code__) == found


def test_an_own_variable_of_a_function_is_none_of_the_function_around_it():
    def outer(a, b, c):
        def inner(a):
            c = [a]
            return [x + 1 for x in a], list(c), list(b)

        return inner(a), c

    assert "b" in iterated(outer.__code__)
    assert not {"a", "c"} & iterated(outer.__code__)


@pytest.mark.parametrize(
    "function", [_named_by_call.__wrapped__, sub, pytest.raises, torch.nn.Module.to, kind_of]
)
def test_the_innermost_call_around_a_name_is_found_in_one_pass(function):
    """As by a search through all calls for each name, which takes the square of their number."""
    code = function.__code__
    instructions = dis.Bytecode(code)
    placed = [each for each in instructions if each.positions and None not in each.positions]
    calls = {_span(each) for each in placed if each.opname in _CALLS}
    expected: dict = {}
    for number, each in enumerate(instructions):
        start, end = _span(each)
        around = [call for call in calls if call[0] <= start and end <= call[1]]
        if around and _named(code)[number][1]:
            inner = max(around, key=lambda call: (*call[0], -call[1][0], -call[1][1]))
            expected.setdefault(inner, []).append(number)
    assert _numbers_by_call(code) == expected


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("things = sorted(model.parameters(), key=id)", "sorted(key=id)"),
        ("things.sort(key=id)", "things.sort(key=id)"),
        (
            "first = min(layers, key=lambda layer: (layer.kind, id(layer)))",
            "min(key=lambda layer: (layer.kind, id(layer)))",
        ),
        ("things = sorted(layers, key=hash)", "sorted(key=hash)"),
        ("first, second = (a, b) if id(a) < id(b) else (b, a)", "id(a) < id(b)"),
        ("held_out = id(sample) % 10 == 0", "id(sample) % 10"),
        ("torch.manual_seed(id(model))", "torch.manual_seed(id(model))"),
    ],
)
def test_an_order_by_addresses_is_found_in_the_text_with_its_line(line, found):
    assert orders_in(f"import elastic\n{line}\n".encode()) == [(2, found)]


@pytest.mark.parametrize(
    "line",
    [
        "frozen = {id(p) for p in head}; rest = [p for p in body if id(p) not in frozen]",
        "is_same = id(a) == id(b)",
        "things = sorted(names, key=len)",
        "names = sorted(names, key=lambda name: name.split('id(')[0])",
        "known[id(module)] = module",
        "for id in ids: things = sorted(rows, key=lambda row: id(row))",
        "print(sorted(things, key=id))",
        "def broken(:  # key=id",
    ],
)
def test_ids_that_give_no_order_are_left_alone(line):
    """Most recipes that ask for an id look an object up by it."""
    assert orders_in(f"import elastic\n{line}\n".encode()) == []
