"""Where in its file's text a frame stands, as the nodes of the syntax tree around its instruction.

Without a text (`exec`, a file that is gone) there is no path, and nothing can be said. A file is
parsed once in a process.
"""

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from opcode import opname
from pathlib import Path
from types import CodeType, FrameType

COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
_OF_OWN = "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"  # functions that Python makes of some
_FOR = ast.For, ast.AsyncFor
_FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextPlace:
    """operation: of the instruction. path: from the function, or the file, down to the innermost
    node; empty without a text.
    """

    code: CodeType
    line: int | None
    operation: str
    path: tuple[ast.AST, ...]

    def __str__(self) -> str:
        return f"{Path(self.code.co_filename).name}:{self.line}"

    @property
    def iterates(self) -> bool:
        """Whether a `for` or a comprehension asks for its next item here."""
        return self.operation.startswith("FOR_ITER")

    @property
    def is_comprehension(self) -> bool:
        """Whether that is a comprehension or a generator expression."""
        if not self.iterates:
            return False
        # Newer versions of Python point at what is iterated over, older ones at the whole.
        inner = self.path[-2:]
        return self.code.co_name in _OF_OWN or any(
            isinstance(each, (ast.comprehension, *COMPREHENSIONS)) for each in inner
        )

    @property
    def iterated(self) -> ast.expr | None:
        """What the innermost `for` iterates over, if it asks here."""
        loops = [each for each in self.path if isinstance(each, _FOR)]
        return loops[-1].iter if self.iterates and loops and loops[-1] not in self.loops() else None

    def loops(self) -> list[ast.AST]:
        """The loops, the outermost first, which come to this place again and again."""
        return [node for node, below in pairwise(self.path) if _repeats(node, below)]

    def statement(self) -> ast.stmt | None:
        """The innermost one."""
        return next((each for each in reversed(self.path) if isinstance(each, ast.stmt)), None)


def place_of(frame: FrameType) -> TextPlace:
    """Where it stands now."""
    return place_at(frame.f_code, frame.f_lasti)


@cache
def place_at(code: CodeType, offset: int) -> TextPlace:
    positions = next(islice(code.co_positions(), offset // 2, None), (None,) * 4)
    span = None if None in positions else _Span.of(positions)
    tree = _tree(code.co_filename)
    below = [] if span is None else list(_around(tree, span))
    found = (tree, *below) if below else ()
    inside = [number for number, each in enumerate(found[:-1]) if isinstance(each, _FUNCTIONS)]
    return TextPlace(
        code=code,
        line=positions[0],
        operation=opname[code.co_code[offset]],
        path=found[inside[-1] if inside else 0 :],
    )


@dataclass(frozen=True, slots=True)
class _Span:
    begin: tuple[int, int]
    end: tuple[int, int]

    @classmethod
    def of(cls, positions: tuple[int | None, ...]) -> "_Span":
        first, last, begin, end = (each or 0 for each in positions)
        return cls((first, begin), (last, end))

    def is_in(self, node: ast.AST) -> bool:
        """True for nodes without a place, which may hold one that has it."""
        if not isinstance(node, (ast.expr, ast.stmt, ast.excepthandler)):
            return True
        last, end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return (node.lineno, node.col_offset) <= self.begin and self.end <= (last, end)


def _around(node: ast.AST, span: _Span) -> Iterator[ast.AST]:
    """The nodes below that hold the span, from the outermost on."""
    for child in ast.iter_child_nodes(node):
        if not span.is_in(child):
            continue
        below = list(_around(child, span))
        if below or isinstance(child, (ast.expr, ast.stmt)):
            yield child
            yield from below
            return


def _repeats(node: ast.AST, below: ast.AST) -> bool:
    match node:
        case ast.While():
            return below not in node.orelse
        case ast.For() | ast.AsyncFor():
            return below in node.body
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return below is not node.generators[0]
        case _:
            return False


@cache
def _tree(path: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])
