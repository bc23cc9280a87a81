"""What a pass of a loop, or a call of a function, has certainly assigned when it is at a place.

A line below an `if` counts where the other branch leaves the pass, or where the place is below the
same one. It does not follow calls, and a loop inside may have no pass.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_SCOPES = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
_LEAVES = ast.Return, ast.Raise, ast.Continue, ast.Break
_FOR = ast.For, ast.AsyncFor
_WITH = ast.With, ast.AsyncWith
_TRY = ast.Try, ast.TryStar
_ALTERNATIVES = ast.If, ast.IfExp, ast.BoolOp, ast.ExceptHandler, ast.match_case, ast.While, *_FOR
_CALL_ALWAYS = "property", "staticmethod", "classmethod"

Target = tuple[str, str]  # a variable, and its attribute or ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Done in every pass. reads: what the values may come from."""

    targets: frozenset[Target]
    reads: frozenset[Target]


def assigned_before(path: Sequence[ast.AST]) -> Iterator[Assignment]:
    """In order. path: from the loop, or the function, down to the place.

    What a `for` itself assigns at the beginning of its pass comes from outside.
    """
    for node, below in pairwise(path):
        if isinstance(node, (*_FOR, ast.While)) and node is not path[0]:
            yield from _of_header(node)
        if isinstance(node, _FOR) and below in node.body and node is not path[0]:
            yield _assignment([node.target], [node.iter])
        if isinstance(node, _WITH) and below in node.body:
            yield from map(_of_item, node.items)
        yield from map(_of_statement, _before(node, below))
    if len(path) > 1 and isinstance(path[-1], (*_FOR, ast.While, ast.Expr, ast.Assign)):
        yield from _of_header(path[-1])


def is_certain(path: Sequence[ast.AST], same_pass: Sequence[ast.AST], *, returns: bool) -> bool:
    """Whether each pass comes to a place, as far as it comes to another one.

    path: down to the first one. same_pass: down to the other one. returns: whether the function may
    have returned before, without coming to it, or a decorator (functools.cache) not have called it.
    """
    decorators = getattr(path[0], "decorator_list", [])
    if returns and not all(isinstance(each, ast.Name) and each.id in _CALL_ALWAYS for each in decorators):
        return False
    for node, below in pairwise(path):
        before = (each for statement in _before(node, below) for each in _inside(statement))
        if returns and any(isinstance(each, ast.Return) for each in before):
            return False
        if not isinstance(node, _ALTERNATIVES) or node in same_pass or node is path[0]:
            continue
        if isinstance(node, ast.If) and _leaves(node.orelse if below in node.body else node.body):
            continue
        if isinstance(node, (ast.If, ast.IfExp, ast.While)) and below is node.test:
            continue
        if (isinstance(node, _FOR) and below is node.iter) or (
            isinstance(node, ast.BoolOp) and below is node.values[0]
        ):
            continue
        return False
    return True


def _of_statement(statement: ast.stmt) -> Assignment:
    match statement:
        case ast.Assign(targets=targets, value=value):
            return _joined([_assignment(targets, [value]), *_of_expression(value)])
        case ast.AnnAssign(target=target, value=value) if value is not None:
            return _joined([_assignment([target], [value]), *_of_expression(value)])
        case ast.If():
            branches = [each for each in (statement.body, statement.orelse) if not _leaves(each)]
            return _common([_of_block(each) for each in branches], reads=frozenset(_reads([statement.test])))
        case ast.With() | ast.AsyncWith():
            return _joined([*map(_of_item, statement.items), _of_block(statement.body)])
        case ast.Try() | ast.TryStar():
            tried = _joined([_of_block(statement.body), _of_block(statement.orelse)])
            caught = [_of_block(each.body) for each in statement.handlers if not _leaves(each.body)]
            return _joined([_common([tried, *caught]), _of_block(statement.finalbody)])
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return Assignment(frozenset({(name, "")}), frozenset(_reads([statement])))
        case ast.Expr(value=value):
            return _joined(_of_expression(value))
        case _:
            return _joined([])


def _of_block(block: Iterable[ast.stmt]) -> Assignment:
    return _joined(map(_of_statement, block))


def _of_item(item: ast.withitem) -> Assignment:
    return _assignment([item.optional_vars] if item.optional_vars else [], [item.context_expr])


def _of_header(node: ast.For | ast.AsyncFor | ast.While | ast.Expr | ast.Assign) -> list[Assignment]:
    match node:
        case ast.For(iter=value) | ast.AsyncFor(iter=value) | ast.While(test=value):
            return _of_expression(value)
        case ast.Expr(value=value) | ast.Assign(value=value):
            return _of_expression(value)


def _of_expression(value: ast.AST) -> list[Assignment]:
    return [_assignment([each.target], [each.value]) for each in _walrus(value)]


def _walrus(value: ast.AST) -> Iterator[ast.NamedExpr]:
    """Those that are computed whenever the whole is."""
    if isinstance(value, ast.NamedExpr):
        yield value
    if not isinstance(value, (ast.BoolOp, ast.IfExp, ast.Lambda, ast.comprehension, ast.stmt)):
        for each in ast.iter_child_nodes(value):
            yield from _walrus(each)


def _assignment(targets: Iterable[ast.AST], values: Iterable[ast.AST]) -> Assignment:
    found = (each for target in targets for each in ast.walk(target))
    stored = (_target(each) for each in found if isinstance(getattr(each, "ctx", None), ast.Store))
    return Assignment(frozenset(each for each in stored if each is not None), frozenset(_reads(values)))


def _target(stored: ast.AST) -> Target | None:
    """`its[fold] = ...` is one of `its`, and `self.its[fold] = ...` of `self.its`."""
    match stored:
        case ast.Name(id=name):
            return name, ""
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return name, attribute
        case ast.Subscript(value=value):
            return _target(value)
        case _:
            return None


def _reads(nodes: Iterable[ast.AST]) -> Iterator[Target]:
    """`self.steps()` reads that attribute, and a `self` by itself all of them."""
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                yield name, attribute
            case ast.Name(id=name, ctx=ast.Load()):
                yield name, ""
            case _:
                yield from _reads(ast.iter_child_nodes(node))


def _joined(assignments: Iterable[Assignment]) -> Assignment:
    """One after the other."""
    targets, reads = frozenset[Target](), frozenset[Target]()
    for each in assignments:
        reads |= {(name, attribute) for name, attribute in each.reads if (name, "") not in targets}
        targets |= each.targets
    return Assignment(targets, reads)


def _common(branches: list[Assignment], reads: frozenset[Target] = frozenset()) -> Assignment:
    """What all of them assign."""
    if not branches:
        return Assignment(frozenset(), frozenset())
    targets = frozenset.intersection(*(each.targets for each in branches))
    return Assignment(targets, reads.union(*(each.reads for each in branches)))


def _leaves(block: list[ast.stmt]) -> bool:
    if not block:
        return False
    last = block[-1]
    return isinstance(last, _LEAVES) or (
        isinstance(last, ast.If) and _leaves(last.body) and _leaves(last.orelse)
    )


def _before(node: ast.AST, below: ast.AST) -> list[ast.stmt]:
    """The statements of the same block; none for an expression."""
    blocks = (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
    found: list[Any] = next((each for each in blocks if isinstance(each, list) and below in each), [below])
    return found[: found.index(below)]


def _inside(statement: ast.AST) -> Iterator[ast.AST]:
    """Without the functions that it defines."""
    yield statement
    if not isinstance(statement, (*_SCOPES, ast.Lambda)):
        for each in ast.iter_child_nodes(statement):
            yield from _inside(each)
