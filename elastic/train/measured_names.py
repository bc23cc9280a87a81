"""Names of numbers that a recipe's text makes from a clock, or from how much memory is used.

Each process measures others, and rightly so. A name counts where any line of the text gives it such
a number, also by way of other names, of a method of what has the name (`meter.update(seconds)`), or
of a function that returns one. It does not follow arguments into functions by their position.
"""

import ast
from collections.abc import Iterator

from elastic.train.recipe_text import called, parsed

_MEASURES = {
    *("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"),
    *("default_timer", "now", "utcnow", "elapsed_time", "getrusage", "virtual_memory", "memory_info"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info"),
    *("memory_stats", "cpu_percent", "getloadavg", "disk_usage", "utilization", "temperature", "power_draw"),
    *("getpid", "current_memory", "get_traced_memory"),
}
_TAKES = {"update", "append", "appendleft", "add", "extend", "push", "record", "observe"}
_OF_PROGRESS_BARS = "format_dict"


def measured_names(text: bytes) -> frozenset[str]:
    """Variables, attributes, keys and arguments by their own names."""
    tree = parsed(text)
    if tree is None:
        return frozenset()
    given = list(_given(tree))
    found, before = frozenset[str](), None
    while found != before:
        before, found = found, found | {name for name, value in given if _is_measured(value, found)}
    return found


def _given(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each name with what a line of the text gives it."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from (pair for target in targets for pair in _names(target, value))
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                yield from _names(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _names(target, value)
            case ast.keyword(arg=str(name), value=value):
                yield name, value
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant):
                        yield str(key.value), value
            case ast.Call(func=ast.Attribute(attr=name, value=owner), args=args) if name in _TAKES:
                yield from (pair for each in args for pair in _names(owner, each))
            case ast.FunctionDef(name=name):
                yield from ((name, each) for each in ast.walk(node) if isinstance(each, ast.Return))
            case _:
                pass


def _names(target: ast.expr, value: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(str(name))):
            # A dict has its keys' names, and what it holds beside is not measured.
            if not isinstance(value, ast.Dict):
                yield name, value
        case ast.Subscript(value=owner):
            yield from _names(owner, value)
        case ast.Tuple(elts=targets):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(targets)
            for each, part in zip(targets, values, strict=False):
                yield from _names(each, part)
        case _:
            pass


def _is_measured(value: ast.AST, names: frozenset[str]) -> bool:
    match value:
        case ast.Call() if called(value) in _MEASURES | names:
            return True
        case ast.Name(id=name) if name in names:
            return True
        case ast.Subscript(value=ast.Name(), slice=ast.Constant(str(name))):
            return name in names
        case ast.Attribute(attr=name) if name in names or name == _OF_PROGRESS_BARS:
            return True
        case _:
            return any(_is_measured(each, names) for each in ast.iter_child_nodes(value))
