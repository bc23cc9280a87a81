"""A set whose elements lie in it by their addresses (address_hash.py) has no order to rely on.

It is refused where code of the recipe iterates it: one that is only asked for its elements is fine.
What sorts by `id`, or computes with it, is found in the recipe's text, and named.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dis import Instruction
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any, NamedTuple

from elastic.train.accesses import Access, Action, Place, accesses, accesses_of
from elastic.train.control_flow import instructions
from elastic.train.recipe_text import called, computing, parsed

_TAKING = "GET_ITER", "LIST_EXTEND", "UNPACK_SEQUENCE", "UNPACK_EX", "CALL_FUNCTION_EX"  # [*s], f(*s)
_ITERATING = frozenset(
    {
        *("list", "tuple", "enumerate", "zip", "map", "sum", "iter", "next", "chain"),
        *("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "stack", "cat"),
    }
)
_METHODS = "LOAD_ATTR", "LOAD_METHOD"
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX", "PRECALL"})
# Between the function that is called and its first argument, if that is a name.
_BETWEEN = {
    *_METHODS,
    "PUSH_NULL",
    "CACHE",
    "LOAD_FAST",
    "LOAD_FAST_BORROW",
    "LOAD_NAME",
    "LOAD_GLOBAL",
    "LOAD_DEREF",
}
_ALL = "*"  # stands for all arguments
_Position = tuple[int, int]  # line and column
_Span = tuple[_Position, _Position]
_SEEDING = {"manual_seed", "seed", "default_rng", "RandomState", "Random"}
# A file without any of these words is not parsed: a recovery waits for this.
_WORDS = re.compile(rb"\bid\(|key\s*=\s*(id|hash)\b")


class _Name(NamedTuple):
    """is_local: of a variable of the function itself, not of one from outside or an attribute."""

    name: str
    is_local: bool = False


def iterated(code: CodeType) -> frozenset[str]:
    """The variables and attributes that a function iterates, or one inside it.

    Not the local variables of those inside it.
    """
    return frozenset(each.name for each in _iterated(code))


def handed_on(functions: Mapping[CodeType, Collection[str]], code: CodeType) -> frozenset[str]:
    """What functions iterate but their own variables, and what calls give to those that iterate it.

    Those are the arguments of a function that iterates all that it gets. Where a function iterates
    some arguments alone, a set may be there to be asked for its elements: then it is what has the
    name of such an argument.

    functions: of the recipe, each with the names that it is called by. code: of the loop.
    """
    names = {each: _iterated(each) for each in functions}
    taking, new = dict[str, set[str]](), True
    while new:
        new = False
        for each, known in names.items():
            given, its = _arguments(each), {one.name for one in known if one.is_local}
            for name in functions[each]:
                before = set(taking.setdefault(name, set()))
                taking[name] |= {_ALL} if given and given <= its else given & its
                new = new or taking[name] != before
        names = {each: known | _beside(each, taking) for each, known in names.items()}
    found = {each.name for known in names.values() for each in known if not each.is_local}
    return frozenset(found.union(each.name for each in _beside(code, taking)))


def _beside(code: CodeType, taking: Mapping[str, Collection[str]]) -> frozenset[_Name]:
    """taking: by the name of a function, the arguments that it iterates."""
    found = set[_Name]()
    for call in _named_by_call(code):
        iterating = set[str]().union(*(taking.get(each.name, ()) for each in call))
        found |= call if _ALL in iterating else {each for each in call if each.name in iterating}
    return frozenset(found.union(*(_outside(code, _beside(each, taking)) for each in _inner_code(code))))


def _arguments(code: CodeType) -> set[str]:
    return {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - {"self", "cls"}


def _inner_code(code: CodeType) -> Iterator[CodeType]:
    return (each for each in code.co_consts if isinstance(each, CodeType))


def _outside(code: CodeType, of_inner: Collection[_Name]) -> Iterator[_Name]:
    """What names of a function inside this one are in this one, without those that are its own."""
    return (_Name(each.name, each.name in code.co_cellvars) for each in of_inner if not each.is_local)


@cache
def _iterated(code: CodeType) -> frozenset[_Name]:
    of_all, found = _named(code), set[_Name]()
    listing = [(each, names) for each, names in of_all if each.opname != "PUSH_NULL"]
    for (each, names), (after, others) in pairwise(listing):
        takes = after.opname in _TAKING or (others == [_Name("pop")] and after.opname in _METHODS)
        if takes and names and _loads_last(each, names[-1]):
            found.add(names[-1])
    found = found.union(
        *(names for names in _named_by_line(code) if not _ITERATING.isdisjoint(_words(names)))
    )
    found |= _given_by_star(code)
    return frozenset(found.union(*(_outside(code, _iterated(each)) for each in _inner_code(code))))


def _words(names: Collection[_Name]) -> set[str]:
    return {each.name for each in names}


@cache
def _named(code: CodeType) -> tuple[tuple[Instruction, list[_Name]], ...]:
    """Each instruction, with the variables and attributes whose values it reads."""
    found = []
    for each, those in zip(instructions(code), accesses(code), strict=True):
        read = [one for one in those if one.action is Action.READ and one.place is not Place.HANDED]
        found.append((each, [_Name(one.name, _is_local(one, code)) for one in read]))
    return tuple(found)


def _is_local(access: Access, code: CodeType) -> bool:
    return access.place is Place.LOCAL or (access.place is Place.SHARED and access.name in code.co_cellvars)


def _loads_last(instruction: Instruction, name: _Name) -> bool:
    """Whether the instruction leaves this on the stack, and not a comprehension's own variable."""
    *_, last = accesses_of(instruction)
    return last.action is Action.READ and last.name == name.name


@cache
def _named_by_call(code: CodeType) -> tuple[frozenset[_Name], ...]:
    """What each call reads itself, its function and its arguments, and not in a call inside it.

    Of a dotted name the last part: the rest is no argument, and neither is the object of a method.
    """
    by_call = _numbers_by_call(code).values()
    return tuple(
        frozenset(name for number in numbers for name in _values(code, number)) for numbers in by_call
    )


def _values(code: CodeType, number: int) -> list[_Name]:
    """What an instruction reads but that of which the next one reads an attribute."""
    names, (after, others) = _named(code)[number][1], _named(code)[number + 1]
    return names[:-1] if others and after.opname in _METHODS else names


@cache
def _numbers_by_call(code: CodeType) -> dict[_Span, list[int]]:
    """By the place of a call, the innermost one, the instructions in it that read by names."""
    placed = [each for each in enumerate(_named(code)) if each[1][0].positions is not None]
    calls = {_span(each) for _, (each, _) in placed if each.opname in _CALLS}
    reading = [(number, _span(each)) for number, (each, names) in placed if names]
    # A call before what stands in it; and of those that begin at one place the outer ones first.
    order = sorted(
        [*((its, -1) for its in calls), *((its, number) for number, its in reading)], key=_outer_first
    )
    found, around = dict[_Span, list[int]](), list[_Span]()
    for its, number in order:
        while around and around[-1][1] < its[1]:
            around.pop()
        if number < 0:
            around.append(its)
        elif around:
            found.setdefault(around[-1], []).append(number)
    return {call: sorted(numbers) for call, numbers in found.items()}


def _outer_first(placed: tuple[_Span, int]) -> tuple[int, ...]:
    ((line, column), (end_line, end_column)), number = placed
    return line, column, -end_line, -end_column, number


def _span(instruction: Instruction) -> _Span:
    its: Any = instruction.positions
    return (its.lineno or 0, its.col_offset or 0), (its.end_lineno or 0, its.end_col_offset or 0)


def _given_by_star(code: CodeType) -> set[_Name]:
    """`s` of `f(*s, scale=2)`: the value that stands first after the function that is called."""
    of_all, found = _named(code), set[_Name]()
    spans = [(each.opname, _span(each)) for each, _ in of_all if each.positions is not None]
    starred = {its for name, its in spans if name == "CALL_FUNCTION_EX"}
    starred -= {its for name, its in spans if name == "LIST_EXTEND"}  # f(x, *s), where it stands before
    for call, numbers in _numbers_by_call(code).items() if starred else ():
        chains = [each for each in numbers if _values(code, each)] if call in starred else []
        if len(chains) > 1 and all(
            of_all[each][0].opname in _BETWEEN for each in range(chains[0] + 1, chains[1])
        ):
            found.add(_values(code, chains[1])[0])
    return found


@cache
def _named_by_line(code: CodeType) -> tuple[frozenset[_Name], ...]:
    """The variables and attributes that each line reads, but those that are asked for elements."""
    by_line: dict[int | None, set[_Name]] = {}
    for (each, names), (after, _) in pairwise(_named(code)):
        line = each.positions.lineno if each.positions else None
        by_line.setdefault(line, set()).update(names[:-1] if after.opname == "CONTAINS_OP" else names)
    return tuple(map(frozenset, by_line.values()))


def refusal(sets: dict[str, str], names: Collection[str]) -> str:
    """sets: of what each is one, by path. names: that are iterated. Empty where none is."""
    for path, kind in sets.items():
        if path.rpartition(".")[2] in names:
            return (
                f"{path} is a set of {kind}, and the recipe iterates it: it has the order of addresses in memory, which are others in each "
                f"process, so that the run may end with another result. Write a list, or dict.fromkeys(...), which has each once in the order of its arguments"
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
