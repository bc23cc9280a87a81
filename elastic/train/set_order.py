"""Where the recipe's text takes the order of a set whose elements lie in it by their addresses.

A set that a variable holds in the loop is refused where the loop iterates it (address_order.py).
One that is made and iterated in one line, or before the loop, has no name there, and its order is
in what was made of it: the numbers of classes, the places of parameters. It is found in the text,
and its elements are known where the text names them, by the variables that the recipe has when the
loop begins. What sorts, counts or asks takes no order.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from elastic.data.attributes import space_of
from elastic.train.address_hash import kind_of
from elastic.train.recipe_text import called, only_shows, parsed

_TAKING = {
    *("list", "tuple", "enumerate", "iter", "zip", "map", "filter", "deque", "chain", "cycle", "islice"),
    *("fromkeys", "extend", "reduce", "stack", "cat"),
}
_WITHOUT_ORDER = {"sorted", "len", "sum", "min", "max", "any", "all", "set", "frozenset", "Counter", "update"}
_NUMBERING = {"enumerate", "zip", "islice", "reduce"}  # also inside of what takes no order
_OF_MODULES = {
    "parameters": "parameters",
    "modules": "modules",
    "children": "modules",
    "buffers": "tensors",
    "named_parameters": "tuples with parameters",
    "named_modules": "tuples with modules",
}
_OF_SETS = {"union", "difference", "intersection", "symmetric_difference", "copy"}
_OPERATORS = ast.Sub, ast.BitOr, ast.BitAnd, ast.BitXor
# A file without any of these is parsed only where a variable is such a set.
_WORDS = re.compile(rb"\bset\(|\bset,|\bfrozenset\b|\bin\s*\{|[(*]\s*\{")

Names = Mapping[str, Any]


def set_orders_in(text: bytes, names: Names) -> list[tuple[int, str]]:
    """The lines of a text that take the order of such a set, and what stands there.

    names: the variables of the recipe, with their values.
    """
    is_held = any(isinstance(each, (set, frozenset)) and kind_of(each) for each in [*names.values()])
    if not (is_held or _WORDS.search(text)) or (tree := parsed(text)) is None:
        return []
    found: dict[int, str] = {}
    for line, thing, shown in _orders(tree):
        if _kind_of_set(thing, names):
            found.setdefault(line, shown)
    return sorted(found.items())


def _orders(tree: ast.AST) -> Iterator[tuple[int, ast.expr, str]]:
    """Line, set and words of each place that iterates something in its order."""
    left = [(tree, True)]  # whether the order reaches the result of what stands around the node
    while left:
        node, is_ordered = left.pop()
        if only_shows(node):
            continue
        name = called(node) if isinstance(node, ast.Call) else ""
        if is_ordered or name in _NUMBERING:
            for thing in _taken(node):
                yield thing.lineno, thing, _shown(node, thing)
        if name in _WITHOUT_ORDER or isinstance(node, ast.SetComp):
            is_ordered = False
        elif isinstance(node, ast.stmt | ast.Lambda) or (name and name not in _TAKING):
            is_ordered = True
        left += ((child, is_ordered) for child in ast.iter_child_nodes(node))


def _taken(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.For(iter=thing) | ast.AsyncFor(iter=thing) | ast.Starred(value=thing):
            return [thing]
        case ast.Assign(targets=[ast.Tuple() | ast.List()], value=thing):
            return [thing]
        case ast.ListComp() | ast.DictComp() | ast.GeneratorExp():
            return [each.iter for each in node.generators]
        case ast.Call(func=ast.Attribute(attr="pop", value=thing), args=[]):
            return [thing]
        case ast.Call() if called(node) in _TAKING:
            return node.args
        case _:
            return []


def _shown(node: ast.AST, thing: ast.expr) -> str:
    match node:
        case ast.Call(func=ast.Attribute(attr="pop")):
            return f"{ast.unparse(thing)}.pop()"
        case ast.Call():
            return f"{called(node)}({ast.unparse(thing)})"
        case ast.Starred():
            return f"*{ast.unparse(thing)}"
        case ast.Assign():
            return ast.unparse(node)
        case _:
            return f"for ... in {ast.unparse(thing)}"


def _kind_of_set(thing: ast.expr, names: Names) -> str:
    """Of what the set that an expression gives is one; empty for others, or where it is unknown."""
    match thing:
        case ast.Call(func=ast.Name(id="set" | "frozenset"), args=[argument]):
            return _kind_of_elements(argument, names)
        case ast.Set(elts=elements):
            return _kind([value for each in elements for value in _values_of(each, names)])
        case ast.SetComp(elt=element, generators=generators):
            return _kind_of_comprehension(element, generators, names)
        case ast.BinOp(left=left, op=operator, right=right) if isinstance(operator, _OPERATORS):
            return _kind_of_set(left, names) or _kind_of_set(right, names)
        case ast.Call(func=ast.Attribute(attr=method, value=held)) if method in _OF_SETS:
            return _kind_of_set(held, names)
        case ast.Name() | ast.Attribute():
            return _kind(
                [each for value in _values_of(thing, names) for each in _elements(value, set, frozenset)]
            )
        case _:
            return ""


def _kind_of_elements(thing: ast.expr, names: Names) -> str:
    """The same, of a set of the elements that an expression gives."""
    match thing:
        case ast.Call(func=ast.Attribute(attr=method, value=held)) if method in _OF_MODULES:
            known = [*_values_of(held, names)]
            return _OF_MODULES[method] if not known or isinstance(known[0], nn.Module) else ""
        case ast.Call(func=ast.Attribute(attr="keys" | "values" | "items" as method, value=held), args=[]):
            dicts = [each for each in _values_of(held, names) if isinstance(each, dict)]
            return _kind([each for held in dicts for each in getattr(dict, method)(held)])
        case ast.Call(func=ast.Name(id="list" | "tuple"), args=[argument]):
            return _kind_of_elements(argument, names)
        case (
            ast.GeneratorExp(elt=element, generators=generators)
            | ast.ListComp(elt=element, generators=generators)
        ):
            return _kind_of_comprehension(element, generators, names)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return _kind([value for each in elements for value in _values_of(each, names)])
        case ast.Name() | ast.Attribute():
            kinds = list, tuple, dict, set, frozenset
            return _kind([each for value in _values_of(thing, names) for each in _elements(value, *kinds)])
        case _:
            return _kind_of_set(thing, names)


def _kind_of_comprehension(element: ast.expr, generators: list[ast.comprehension], names: Names) -> str:
    """Of one that takes elements as they are: `{p for p in net.parameters() if p.ndim > 1}`."""
    for each in generators:
        if isinstance(element, ast.Name) and ast.unparse(each.target) == element.id:
            return _kind_of_elements(each.iter, names)
    return ""


def _kind(elements: Collection[Any]) -> str:
    return kind_of(elements) or ""


def _elements(value: Any, *kinds: type) -> list[Any]:
    return [*value] if type(value) in kinds else []


def _values_of(thing: ast.expr, names: Names) -> Iterator[Any]:
    """What an expression names, without running any code of the recipe's; nothing if unknown."""
    match thing:
        case ast.Constant(value=value):
            yield value
        case ast.Lambda():
            yield _values_of  # some function
        case ast.Tuple(elts=elements):
            yield tuple(value for each in elements for value in _values_of(each, names))
        case ast.Name(id=name) if name in names:
            yield names[name]
        case ast.Attribute(value=holder, attr=name):
            for each in _values_of(holder, names):
                held = vars(each) if isinstance(each, (ModuleType, type)) else space_of(each)
                if name in held:
                    yield held[name]
        case _:
            return
