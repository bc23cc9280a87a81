"""Sets whose elements lie in them by their addresses are refused where a recipe iterates them."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from elastic.train.address_hash import kind_of
from elastic.train.address_order import iterated, orders_in
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
FINE = {
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
