"""A set whose elements lie in it by their addresses (address_hash.py) has no order to rely on.

It is refused where code of the recipe iterates it: one that is only asked for its elements is fine.
What sorts by `id`, or computes with it, is found in the recipe's text, and named.
"""

import ast
import re
from collections.abc import Collection, Mapping
from dis import Instruction
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

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
_Place = tuple[int, int]  # line and column
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
    found = found.union(*(names for names in _named_by_line(code) if names & _ITERATING))
    return frozenset(found).union(*(iterated(each) for each in code.co_consts if isinstance(each, CodeType)))


def handed_on(functions: Mapping[CodeType, Collection[str]], code: CodeType) -> frozenset[str]:
    """What functions iterate, and the arguments of calls of those that iterate all that they get.

    Where a function iterates some arguments alone, a set may be there to be asked for its elements.

    functions: of the recipe, each with the names that it is called by. code: of the loop.
    """
    names = {each: iterated(each) for each in functions}
    takers, new = set[str](), {""}
    while new - takers:
        takers |= new
        names = {each: known | _beside(each, takers) for each, known in names.items()}
        taking = (each for each, known in names.items() if known.issuperset(_arguments(each)))
        new = {name for each in taking for name in functions[each]}
    return frozenset(_beside(code, takers)).union(*names.values())


def _beside(code: CodeType, names: set[str]) -> frozenset[str]:
    inner = (_beside(each, names) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset().union(*(call for call in _named_by_call(code) if call & names), *inner)


def _arguments(code: CodeType) -> set[str]:
    """Those that a call gives; one that has none is called without a set."""
    return {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - {"self", "cls"} or {""}


@cache
def _named_by_call(code: CodeType) -> tuple[frozenset[str], ...]:
    """What each call reads itself, its function and its arguments, and not in a call inside it."""
    places = [(each, _span(each)) for each in instructions(code) if each.positions is not None]
    calls = {its for each, its in places if each.opname.startswith("CALL")}
    found: dict[tuple[_Place, _Place], set[str]] = {}
    for each, (start, end) in places:
        if each.opname in (*_LOADS, *_METHODS):
            around = [call for call in calls if call[0] <= start and end <= call[1]]
            if around:  # the innermost one begins last, or ends first
                found.setdefault(max(around, key=_inner), set()).add(each.argval)
    return tuple(map(frozenset, found.values()))


def _span(instruction: Instruction) -> tuple[_Place, _Place]:
    its: Any = instruction.positions
    return (its.lineno or 0, its.col_offset or 0), (its.end_lineno or 0, its.end_col_offset or 0)


def _inner(call: tuple[_Place, _Place]) -> tuple[int, ...]:
    (line, column), (end_line, end_column) = call
    return line, column, -end_line, -end_column


@cache
def _named_by_line(code: CodeType) -> tuple[frozenset[str], ...]:
    """The variables and attributes that each line reads, but those that are asked for elements."""
    by_line: dict[int | None, set[str]] = {}
    for each, after in pairwise(instructions(code)):
        if each.opname in (*_LOADS, *_METHODS) and after.opname != "CONTAINS_OP":
            by_line.setdefault(each.positions.lineno if each.positions else None, set()).add(each.argval)
    return tuple(map(frozenset, by_line.values()))


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
