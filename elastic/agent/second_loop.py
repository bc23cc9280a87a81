"""A second loop is announced before the first one's hours are spent, if the text surely has one.

A run is one loop, and run.steps refuses a second call when it comes. Only calls that every way
through the same function makes are counted: a branch may be the other one, and a function may not
be called. So what is announced comes true, unless the script fails before, and what is not
announced may still be refused.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CONDITIONAL = (ast.If, ast.IfExp, ast.Try, ast.TryStar, ast.While, ast.Match, ast.BoolOp, ast.comprehension)
_EXITS = {"exit", "quit", "_exit"}


def note(recipe: Path, text: bytes, run_dir: str) -> str:
    """What to tell the user; empty where the text shows no second loop."""
    lines = lines_of_calls(text)
    if not lines:
        return ""
    where = f"in line {lines[0]} and again in line {lines[1]}"
    if lines[0] == lines[1]:
        where = f"again and again in line {lines[0]}"
    return (
        f"{recipe} calls run.steps {where}: a run is one loop, and the second call will be refused when the first loop is over."
        f" Make a recipe of each phase, and begin the second from the state of the first:"
        f" elastic-train SECOND_RECIPE --from {run_dir} --run-dir NEW"
    )


def lines_of_calls(text: bytes) -> list[int]:
    """The lines of the first two calls of `run.steps` that one function surely makes, or none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    runs = set(_runs(tree))
    bodies = [tree.body]
    bodies += [each.body for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    for body in bodies:
        lines = _certain(body, runs)
        if len(lines) > 1:
            return lines[:2]
    return []


def _runs(tree: ast.Module) -> Iterator[str]:
    """The names that are given what elastic.start returns."""
    for each in ast.walk(tree):
        match each:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=function)):
                if ast.unparse(function) in ("elastic.start", "start"):
                    yield name
            case _:
                pass


def _certain(block: Iterable[ast.stmt], runs: set[str]) -> list[int]:
    """The lines of the calls that every way through the block makes, in order."""
    lines: list[int] = []
    for statement in block:
        lines += _of(statement, runs)
        if _may_leave(statement):
            break
    return lines


def _of(node: ast.AST, runs: set[str]) -> list[int]:
    match node:
        case ast.If(test=test, body=body) if ast.unparse(test) == "__name__ == '__main__'":
            return _certain(body, runs)
        case ast.For(iter=iterated, body=body):
            is_whole = not any(
                isinstance(each, ast.Break | ast.Continue) for inside in body for each in _own_nodes(inside)
            )
            inner = _certain(body, runs) if is_whole else []
            return [*_of(iterated, runs), *inner, *inner]
        case ast.With(items=items, body=body):
            return [line for item in items for line in _of(item, runs)] + _certain(body, runs)
        case ast.Call(func=ast.Attribute(attr="steps", value=ast.Name(id=name))) if name in runs:
            return [node.lineno]
    if isinstance(node, (*_FUNCTIONS, *_CONDITIONAL)):
        return []
    return [line for child in ast.iter_child_nodes(node) for line in _of(child, runs)]


def _may_leave(statement: ast.stmt) -> bool:
    """Whether what follows it may never run although nothing failed."""
    return any(
        isinstance(each, ast.Return) or (isinstance(each, ast.Call) and _name(each.func) in _EXITS)
        for each in _own_nodes(statement)
    )


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Without the bodies of functions, which run elsewhere."""
    if not isinstance(node, _FUNCTIONS):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)


def _name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]
