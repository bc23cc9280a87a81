"""The order of a set whose elements lie in it by their addresses is found in a recipe's text."""

import sys
import types

import pytest
import torch
from torch import nn

from elastic.train import recipe_text
from elastic.train.set_order import set_orders_in

NET = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
NAMES = {
    "torch": torch,
    "net": NET,
    "records": [("cat", len), ("dog", None), ("dog", "puppy"), ("cat", len)],
    "labels": ["cat", "dog", "cat"],
    "table": {torch.neg: 1, torch.tanh: 2},
    "views": {torch.neg, torch.tanh},
    "norms": {NET[0].weight},
    "flip": torch.neg,
    "noise": lambda x: x,
    "words": {"a", "b"},
}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ids = {c: n for n, c in enumerate(set(records))}", "enumerate(set(records))"),
        ("order = list(set(net.parameters()))", "list(set(net.parameters()))"),
        ("for module in set(net.modules()): pass", "for ... in set(net.modules())"),
        ("rest = list(set(net.parameters()) - norms)", "list(set(net.parameters()) - norms)"),
        ("rest = tuple(set(net.children()).difference(norms))", "tuple(set(net.children()).difference(norms))"),
        ("rest = [p for p in {p for m in net.modules() for p in m.parameters()}]", "for ... in {p for m in net.modules() for p in m.parameters()}"),
        ("chain = nn.Sequential(*{flip, noise})", "*{flip, noise}"),
        ("for f in {torch.neg, torch.tanh}: pass", "for ... in {torch.neg, torch.tanh}"),
        ("first = set(records).pop()", "set(records).pop()"),
        ("first = next(iter(frozenset(records)))", "iter(frozenset(records))"),
        ("a, b = set(table)", "a, b = set(table)"),
        ("pairs = zip(set(table.keys()), labels)", "zip(set(table.keys()))"),
        ("order = [table[f] for f in views]", "for ... in views"),
        ("order = sorted(enumerate(set(records)))", "enumerate(set(records))"),
        ("def build(net):\n    return [p for p in set(net.parameters())]", "for ... in set(net.parameters())"),
        ("kinds = list({*records})", None),
        ("kinds = list(set(unknown))", None),
        ("kinds = sorted(set(labels))", None),
        ("ids = {c: n for n, c in enumerate(set(labels))}", None),
        ("ids = {c: n for n, c in enumerate(sorted(set(records), key=str))}", None),
        ("many = len(set(records)) + len(list(set(records)))", None),
        ("many = sum(p.numel() for p in set(net.parameters()))", None),
        ("is_known = flip in set(table) or any(f is flip for f in set(table))", None),
        ("print(list(set(records)))", None),
        ("kinds = {str(each) for each in set(records)}", None),
        ("kinds = dict.fromkeys(records)", None),
        ("for word in words: pass", None),
        ("def broken(:  # set(records)", None),
    ],
)  # fmt: skip
def test_a_set_that_is_made_and_iterated_in_one_line_is_named_with_it(line, found):
    """Strings, what is sorted or counted, and what the text does not tell give no note."""
    places = [(2 + line.count("\n"), found)] if found else []
    assert set_orders_in(f"import elastic\n{line}\n".encode(), NAMES) == places


def test_a_file_without_sets_is_not_parsed(monkeypatch):
    monkeypatch.setattr("elastic.train.set_order.parsed", None)
    assert set_orders_in(b"x = {'a': 1}\nfor y in x: pass\n", {"x": {}, "y": {1, 2}}) == []


def test_names_are_those_of_each_file_and_of_the_frames_that_run_it(monkeypatch, tmp_path):
    """`records` is a variable of main(), in whose frame the loop is; `kinds` of a module beside."""
    main, beside = tmp_path / "train.py", tmp_path / "kinds.py"
    main.write_text(
        "import sys, kinds\ndef main():\n    records = [len, sum]\n    ids = enumerate(set(records))\n    return begin()\n"
    )
    beside.write_text("kinds = [int, str]\nnumbered = list(set(kinds))\n")
    found = []
    space = types.ModuleType("__main__")
    vars(space).update(
        __file__=str(main),
        begin=lambda: found.extend(recipe_text.places_by_names(set_orders_in, sys._getframe())),
    )
    module = types.ModuleType("kinds")
    module.__file__ = str(beside)
    monkeypatch.setitem(sys.modules, "__main__", space)
    monkeypatch.setitem(sys.modules, "kinds", module)
    for each, path in ((module, beside), (space, main)):
        exec(compile(path.read_text(), str(path), "exec"), vars(each))
    space.main()

    assert found == ["train.py:4 (enumerate(set(records)))", "kinds.py:2 (list(set(kinds)))"]
