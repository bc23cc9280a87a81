"""A set whose elements lie in it by their addresses (address_hash.py) has no order to rely on.

It is refused where code of the recipe iterates it: one that is only asked for its elements is fine.
What sorts by `id`, or computes with it, is found in the recipe's text, and named.
"""

import ast
import re
from collections.abc import Collection
from functools import cache
from itertools import pairwise
from types import CodeType

from elastic.train.control_flow import instructions
from elastic.train.recipe_text import called, computing, parsed

_LOADS = "LOAD_NAME", "LOAD_GLOBAL", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_ATTR"
_METHODS = "LOAD_ATTR", "LOAD_METHOD"
_TAKING = "GET_ITER", "LIST_EXTEND", "UNPACK_SEQUENCE", "UNPACK_EX"  # [*s], a, b = s
_ITERATING = frozenset(
    {
        *("list", "tuple", "enumerate", "zip", "map", "sum", "iter", "next", "chain"),
        *("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "stack", "cat"),
    }
)
_SEEDING = {"manual_seed", "seed", "default_rng", "RandomState", "Random"}
# A file without any of these words is not parsed: a recovery waits for this.
_WORDS = re.compile(rb"\bid\(|key\s*=\s*(id|hash)\b")


@cache
def iterated(code: CodeType) -> frozenset[str]:
    """The variables and attributes that a function, or one inside it, iterates."""
    of_all = instructions(code)
    found = {
        before.argval
        for before, each in pairwise(of_all)
        if before.opname in _LOADS
        and (each.opname in _TAKING or (each.opname in _METHODS and each.argval == "pop"))
    }
    by_line: dict[int | None, set[str]] = {}
    for each, after in pairwise(of_all):
        if each.opname in (*_LOADS, *_METHODS) and after.opname != "CONTAINS_OP":
            by_line.setdefault(each.positions.lineno if each.positions else None, set()).add(each.argval)
    found = found.union(*(names for names in by_line.values() if names & _ITERATING))
    return frozenset(found).union(*(iterated(each) for each in code.co_consts if isinstance(each, CodeType)))


def refusal(sets: dict[str, str], names: Collection[str]) -> str:
    """sets: of what each is one, by path. names: that are iterated. Empty where none is."""
    for path, kind in sets.items():
        if path.rpartition(".")[2] in names:
            return (
                f"{path} is a set of {kind}, and the recipe iterates it: it has the order of addresses in memory, which are others in each "
                f"process, so that the run would end with another result. Write a list, or dict.fromkeys(...), which has each once in the order of its arguments"
            )
    return ""


def orders_in(text: bytes) -> list[tuple[int, str]]:
    """The lines of a text that order, choose or compute by an address, and what stands there."""
    if _WORDS.search(text) is None or (tree := parsed(text)) is None:
        return []
    names = {
        each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    found: dict[int, str] = {}
    for node in computing(tree) if "id" not in names else ():
        if shown := _ordering(node):
            found.setdefault(getattr(node, "lineno", 0), shown)
    return sorted(found.items())


def _ordering(node: ast.AST) -> str:
    match node:
        case ast.Call(func=function, keywords=[*keywords]) if any(map(_is_key, keywords)):
            key = next(filter(_is_key, keywords))
            return f"{ast.unparse(function)}(key={ast.unparse(key.value)})"
        case ast.Call(args=[argument]) if called(node) in _SEEDING and _is_address(argument):
            return ast.unparse(node)
        case ast.BinOp(left=left, right=right) if _is_address(left) or _is_address(right):
            return ast.unparse(node)
        case ast.Compare(left=left, ops=[ast.Lt() | ast.Gt() | ast.LtE() | ast.GtE()], comparators=[right]):
            return ast.unparse(node) if _is_address(left) or _is_address(right) else ""
        case _:
            return ""


def _is_key(keyword: ast.keyword) -> bool:
    match keyword:
        case ast.keyword(arg="key", value=ast.Name(id="id" | "hash")):
            return True
        case ast.keyword(arg="key", value=ast.Lambda(body=body)):
            return any(isinstance(each, ast.expr) and _is_address(each) for each in ast.walk(body))
        case _:
            return False


def _is_address(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "id"
